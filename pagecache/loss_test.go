package pagecache

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// logbook keeps what is logged.
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

// TestDeviceLost loses a device in each call that goes to it. The mount goes on, home and the other device have what was
// home and what the other released, and what was lost is named.
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
		"sync": func(_ *program, src *source) error { return src.attached.Sync(func() error { return nil }) },
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
			require.NoError(t, src.attached.Sync(func() error { return nil }))
			want := src.home.bytes(0, 10*page.Size)
			p.add(page.Size)
			p.release() // pending when the device goes
			q.store(2*page.Size, 77)
			q.release()
			want[2*page.Size] = 77

			m.devices[0].Lose()
			if err := lose(p, src); err != nil {
				require.ErrorIs(t, err, gpubackend.ErrDeviceLost)
				require.ErrorIs(t, err, syscall.ENODEV)
			}
			if name == "acquire" {
				want[3*page.Size] = 9
			}
			require.NoError(t, src.attached.Sync(func() error { return nil }))
			require.True(t, bytes.Equal(want, src.read(t, 0, 10*page.Size)))
			q.acquire()
			require.True(t, bytes.Equal(want, q.all()), "the other device goes on")

			status := m.cache.Status()
			require.True(t, status.Devices[0].Lost)
			require.False(t, status.Devices[1].Lost)
			require.EqualValues(t, 1, status.Counters["lost_pages"])
			require.Zero(t, status.Devices[0].UsedBytes)
			require.Contains(t, book.String(), "device lost; the mount goes on without it")
			require.Contains(t, book.String(), `msg="released bytes were lost with the device" device=0 file=file pages=1`)

			_, err := m.cache.Map(context.Background(), src, MapRequest{Len: page.Size})
			require.ErrorIs(t, err, syscall.ENODEV)
			_, err = p.Acquire(context.Background(), 0, p.len, false)
			require.ErrorIs(t, err, syscall.ENODEV)
			_, err = p.Release(context.Background(), 0, p.len)
			require.ErrorIs(t, err, syscall.ENODEV)
			_ = p.Unmap(context.Background())
		})
	}
}

// TestOthersTakeTheGPUsMemory: the driver has no memory although the budget is not used up. Idle extents make room first;
// then the words say who has it.
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
