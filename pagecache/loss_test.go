package pagecache

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// logbook collects log output.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func logTo(l *logbook) machineOption {
	return func(o *Options, _ *int64) { o.Log = slog.New(slog.NewTextHandler(l, nil)) }
}

// TestDeviceLost loses a device in each kind of call. The mount goes on. Home and the other device keep the bytes that
// were home and those that the other device released. The loss is named.
func TestDeviceLost(t *testing.T) {
	for name, lose := range map[string]func(p *program, src *source) error{
		"acquire": func(p *program, src *source) error {
			src.write(p.t, 3*page.Size, []byte{9})
			_, err := p.Acquire(context.Background(), 0, p.len, false)
			return err
		},
		"release": func(p *program, _ *source) error {
			_, err := p.Release(context.Background(), 0, p.len)
			return err
		},
		"sync": func(_ *program, src *source) error {
			return src.attached.Sync(context.Background(), func() error { return nil })
		},
		"read": func(p *program, src *source) error { src.read(p.t, 0, page.Size); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			book := &logbook{}
			m := newMachine(t, 2, logTo(book))
			src := m.noisyFile(10 * page.Size)
			p := m.run(src, 0, 0, 10*page.Size, true)
			q := m.run(src, 1, 0, 10*page.Size, true)
			p.add(0)
			p.release()
			require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
			want := src.home.bytes(0, 10*page.Size)
			p.add(page.Size)
			p.release() // pending when the device goes
			q.store(2*page.Size, 77)
			q.release()
			want[2*page.Size] = 77

			m.devices[0].Lose()
			var syncErr error
			if err := lose(p, src); name == "sync" {
				syncErr = err
			} else if err != nil {
				require.ErrorIs(t, err, gpubackend.ErrDeviceLost)
				require.ErrorIs(t, err, syscall.ENODEV)
			}
			if name == "acquire" {
				want[3*page.Size] = 9
			}
			synced := false
			err := errors.Join(src.attached.Sync(context.Background(),
				func() error { synced = true; return nil }), syncErr)
			require.ErrorIs(t, err, syscall.EIO, "the next fsync fails, once")
			require.ErrorContains(t, err, "released bytes of file were lost with device 0: pages [1,2), 1 in all; the file keeps its earlier content")
			require.True(t, synced)
			require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
			require.True(t, bytes.Equal(want, src.read(t, 0, 10*page.Size)))
			q.acquire()
			require.True(t, bytes.Equal(want, q.all()), "the other device goes on")

			status := m.cache.Status()
			require.True(t, status.Devices[0].Lost)
			require.False(t, status.Devices[1].Lost)
			require.EqualValues(t, 1, status.Counters["lost_pages"])
			require.Equal(t, []*Loss{{Device: 0, ID: src.id, File: "file", Pages: 1, Runs: [][2]page.Index{{1, 2}}}},
				status.Losses)
			require.Zero(t, status.Devices[0].Extents)
			require.NotZero(t, status.Devices[0].UsedBytes, "a client still maps it")
			require.Contains(t, book.String(), "device lost; the mount goes on without it")
			require.Contains(t, book.String(),
				`msg="released bytes were lost with the device" device=0 file=file pages=1 where=[1,2)`)
			require.Contains(t, book.String(),
				`msg="stores since the last release were lost with the device" device=0 file=file mappings=1`)

			_, err = m.cache.Map(context.Background(), src, MapRequest{Len: page.Size})
			require.ErrorIs(t, err, syscall.ENODEV)
			_, err = p.Acquire(context.Background(), 0, p.len, false)
			require.ErrorIs(t, err, syscall.ENODEV)
			_, err = p.Release(context.Background(), 0, p.len)
			require.ErrorIs(t, err, syscall.ENODEV)
			require.ErrorIs(t, p.Unmap(context.Background()), syscall.ENODEV, "its stores are not released")
			p.giveUp()
			require.Zero(t, m.cache.Status().Devices[0].UsedBytes)
			err = m.cache.Close(context.Background())
			require.ErrorContains(t, err, "released bytes of file were lost with device 0: pages [1,2), 1 in all")
			require.NotErrorIs(t, err, syscall.ENODEV)
		})
	}
}

// TestFilesThatNobodyTouchesLetGo: one file notices a loss, and every file reports its own, even if nobody maps it any
// more. Each keeps its error for the next fsync.
func TestFilesThatNobodyTouchesLetGo(t *testing.T) {
	m := newMachine(t, 1)
	m.cache.beginMapping() // otherwise the released bytes come home soon after the last unmap
	defer m.cache.endMapping()
	found, quiet, deleted := m.noisyFile(4*page.Size), m.noisyFile(4*page.Size), m.noisyFile(4*page.Size)
	for _, src := range []*source{found, quiet, deleted} {
		p := m.run(src, 0, 0, 4*page.Size, true)
		p.add(page.Size)
		p.add(3 * page.Size)
		p.release()
		p.unmap()
	}
	m.cache.Forget(deleted.id)
	want := found.home.bytes(0, 4*page.Size)
	m.devices[0].Lose()
	require.True(t, bytes.Equal(want, found.read(t, 0, 4*page.Size)))
	for len(m.cache.Status().Losses) < 2 {
		runtime.Gosched()
	}
	m.cache.lanes.work.Wait() // the memory of a forgotten file is freed in the background
	require.Zero(t, m.cache.Status().Devices[0].UsedBytes)
	for _, src := range []*source{found, quiet} {
		require.False(t, src.attached.Detached(), "its loss has not been reported")
		err := src.attached.Sync(context.Background(), func() error { return syscall.ENOSPC })
		require.ErrorIs(t, err, syscall.EIO)
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.ErrorContains(t, err, "pages [1,2) [3,4), 2 in all")
		require.True(t, src.attached.Detached())
	}
	require.True(t, deleted.attached.Detached())
	require.ErrorContains(t, m.cache.Close(context.Background()), "pages [1,2) [3,4), 2 in all")
}

// TestLossInRareCalls loses a device in the rarest calls.
func TestLossInRareCalls(t *testing.T) {
	for op, call := range map[faulty.Op]func(m *machine, p *program) error{
		faulty.Alloc: func(m *machine, _ *program) error {
			_, err := m.cache.Map(context.Background(), m.noisyFile(page.Size), MapRequest{Len: page.Size})
			return err
		},
		faulty.Zero: func(m *machine, _ *program) error {
			_, err := m.cache.Map(context.Background(), m.noisyFile(page.Size), MapRequest{Len: page.Size})
			return err
		},
		faulty.Export: func(m *machine, _ *program) error {
			_, err := m.cache.Map(context.Background(), m.noisyFile(page.Size), MapRequest{Len: page.Size, Lazy: true})
			return err
		},
		faulty.Modified: func(_ *machine, p *program) error {
			return p.Advise(context.Background(), 0, page.Size, AdviceDontNeed)
		},
	} {
		t.Run(op.String(), func(t *testing.T) {
			testdevice.Emulated(t, "a GPU's memory comes zeroed")
			book := &logbook{}
			m := newMachine(t, 1, logTo(book))
			src := m.noisyFile(4 * page.Size)
			p := m.run(src, 0, 0, 4*page.Size, true)
			m.devices[0].Fail(op, 1, gpubackend.ErrDeviceLost)
			require.ErrorIs(t, call(m, p), syscall.ENODEV)
			require.True(t, m.cache.Status().Devices[0].Lost)
			require.Contains(t, book.String(), "device lost; the mount goes on without it")
			require.ErrorIs(t, p.Unmap(context.Background()), syscall.ENODEV)
		})
	}
}

// TestLossWhileHomeTakesNothing: home cannot be written, so a read merges home with the device's bytes, until the
// device is lost.
func TestLossWhileHomeTakesNothing(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	last := page.Size - 1 // a failing write writes part of its bytes
	before := src.home.bytes(0, page.Size)
	p.add(last)
	p.release()
	src.home.fail(syscall.ENOSPC)
	require.Equal(t, before[last]+1, src.read(t, 0, page.Size)[last])
	// The collect copies out first, and then the merge does.
	m.devices[0].Fail(faulty.CopyOut, 2, gpubackend.ErrDeviceLost)
	require.True(t, bytes.Equal(before, src.read(t, 0, page.Size)))
	require.ErrorIs(t, src.attached.Sync(context.Background(), func() error { return nil }), syscall.EIO)
	require.ErrorIs(t, p.Unmap(context.Background()), syscall.ENODEV)
	require.Error(t, m.cache.Close(context.Background()))
}

// TestNoMemoryForACopy: there is no memory, on the host or on the device, for a copy.
func TestNoMemoryForACopy(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	m.devices[0].Fail(faulty.Modified, 1, gpubackend.ErrNoMemory)
	_, err := p.Release(context.Background(), 0, p.len)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "device 0 has no memory left for a copy; other programs use it")
	p.add(5)
	p.release()
	require.False(t, m.cache.Status().Devices[0].Lost)
}

// TestOthersTakeTheGPUsMemory: the driver has no memory although the budget is not used up. First idle extents make
// room; then the error says who has the memory.
func TestOthersTakeTheGPUsMemory(t *testing.T) {
	m := newMachine(t, 1)
	idle := m.noisyFile(page.Size)
	m.run(idle, 0, 0, page.Size, false).unmap()
	src := m.noisyFile(page.Size)
	m.devices[0].Fail(faulty.Alloc, 1, gpubackend.ErrNoMemory)
	p := m.run(src, 0, 0, page.Size, false)
	require.Equal(t, src.home.data, p.all())
	require.EqualValues(t, 1, m.cache.counters.Evictions.Load())

	m.devices[0].Fail(faulty.Alloc, 1, gpubackend.ErrNoMemory)
	_, err := m.cache.Map(context.Background(), m.noisyFile(page.Size), MapRequest{Len: page.Size})
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "other programs use the GPU's memory")
	require.ErrorContains(t, err, "only 2.0 MiB of its 64 MiB are used here")
	p.acquire()
}
