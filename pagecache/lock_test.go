package pagecache

import (
	"context"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// waitedContext ends as soon as a caller waits for its end.
type waitedContext struct {
	context.Context
	cancel context.CancelFunc
	waited sync.Once
}

func newWaitedContext(t *testing.T) *waitedContext {
	ctx, cancel := context.WithCancel(t.Context())
	return &waitedContext{Context: ctx, cancel: cancel}
}

func (c *waitedContext) Done() <-chan struct{} {
	c.waited.Do(c.cancel)
	return c.Context.Done()
}

// TestNobodyWaitsForTheFileBeyondHisContext: the file's lock is held, for example by a goroutine that waits for a disk
// that hangs. Requests whose programs are killed end, and leave nothing behind.
func TestNobodyWaitsForTheFileBeyondHisContext(t *testing.T) {
	for name, call := range map[string]func(ctx context.Context, src *source) error{
		"read": func(ctx context.Context, src *source) error {
			_, _, err := src.attached.Read(ctx, make([]byte, page.Size), 0, false, src.reader)
			return err
		},
		"read range": func(ctx context.Context, src *source) error {
			return src.attached.ReadRange(ctx, page.Span(0, page.Size))
		},
		"write": func(ctx context.Context, src *source) error {
			return src.attached.ChangeHome(ctx, Change{Kind: ChangeWrite, Len: 10}, func(int64, int64) error {
				panic("it changes home")
			})
		},
		"truncate": func(ctx context.Context, src *source) error {
			return src.attached.ChangeHome(ctx, Change{Kind: ChangeTruncate}, func(int64, int64) error {
				panic("it changes home")
			})
		},
		"sync":       func(ctx context.Context, src *source) error { return src.attached.Sync(ctx, nil) },
		"bring home": func(ctx context.Context, src *source) error { return src.attached.BringHome(ctx) },
		"before a write without a request": func(ctx context.Context, src *source) error {
			return src.attached.BeforeWrite(ctx, -1)
		},
		"stores past end of file": func(ctx context.Context, src *source) error {
			return src.attached.forgetPastEnd(ctx, nil, page.From(0).Pages())
		},
		"releases that drain": func(ctx context.Context, src *source) error {
			return src.attached.kernel.Await(ctx, page.From(0).Pages())
		},
		"release": func(ctx context.Context, src *source) error {
			_, err := anyHolding(src).modified(ctx, nil)
			return err
		},
		"acquire": func(ctx context.Context, src *source) error {
			_, err := src.attached.acquire(ctx, anyHolding(src), page.Span(0, page.Size).Pages())
			return err
		},
		"expose": func(ctx context.Context, src *source) error {
			return src.attached.refreshExposed(ctx, nil)
		},
		"rights": func(ctx context.Context, src *source) error {
			src.attached.RightsTouched(ctx)
			return ctx.Err()
		},
		"evict": func(ctx context.Context, src *source) error {
			_, err := src.attached.c.Evict(ctx, src.ID(), -1)
			return err
		},
		"verify": func(ctx context.Context, src *source) error {
			_, err := src.attached.verifySome(ctx, nil, page.Range{}, nil)
			return err
		},
		"map": func(ctx context.Context, src *source) error {
			_, err := src.attached.c.Map(ctx, src, MapRequest{Len: page.Size})
			return err
		},
		"map a view": func(ctx context.Context, src *source) error {
			_, err := src.attached.c.mapView(ctx, []Source{src}, ViewRequest{
				Segments: []view.Segment{{Length: 1, Count: 1}}, Alignment: 1,
			})
			return err
		},
		"begin a group": func(ctx context.Context, src *source) error {
			return (&groupPart{f: src.attached}).take(ctx)
		},
		"bytes that only the kernel has": func(ctx context.Context, src *source) error {
			return src.attached.kernel.SendGrowth(ctx)
		},
		"check": func(ctx context.Context, src *source) error {
			_, err := src.attached.CheckHome(ctx)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1)
			src, _ := m.sharedFile(sharedSize)
			m.run(src, 0, 0, sharedSize, true)
			f := src.attached
			f.mu.Lock()
			reaches := f.ReachesPast(math.MaxInt64)
			err := call(newWaitedContext(t), src)
			f.mu.Unlock()
			require.True(t, reaches, "a call that only asks does not wait at all")
			require.ErrorIs(t, err, context.Canceled)
			require.NoError(t, f.Sync(t.Context(), nil), "a call that gave up has released the lock, or will")
		})
	}
}

// TestReleaseWaitsNoLongerForItsSecondLook: the lock is taken while a release scans device memory. The release ends
// with its context, and its scans end once the lock is free.
func TestReleaseWaitsNoLongerForItsSecondLook(t *testing.T) {
	m := newMachine(t, 1)
	src, _ := m.sharedFile(sharedSize)
	p := m.run(src, 0, 0, sharedSize, true)
	p.add(0)
	f, x := src.attached, p.h.extents[0]
	looks := m.devices[0].Hold(faulty.Modified)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := p.Release(ctx, 0, p.len)
		ended <- err
	}()
	<-looks.Arrived()
	f.mu.Lock()
	require.Equal(t, 1, x.scans)
	looks.Open()
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Equal(t, 1, x.scans)
	f.mu.Unlock()
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return x.scans == 0
	}, patient, time.Millisecond)
	require.EqualValues(t, 1, p.release(), "nothing was released")
}

// TestReadsOfDevicesWaitNoLonger is the same test for a read that chooses the device.
func TestReadsOfDevicesWaitNoLonger(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	readTwice(t, src, 0, page.Size)
	f := src.attached
	f.clean.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	_, _, err := f.Read(newWaitedContext(t), make([]byte, page.Size), 16*page.Size, true, src.reader)
	require.ErrorIs(t, err, context.Canceled)
}

// anyHolding returns one of the file's holdings.
func anyHolding(src *source) *holding {
	for _, h := range src.attached.holdings {
		return h
	}
	return nil
}

// TestAwaited: programs that wait for a file count while they wait, whatever becomes of them. Read-ahead and work in
// the background do not.
func TestAwaited(t *testing.T) {
	for name, wait := range map[string]func(ctx context.Context, l *fileLock){
		"Lock": func(_ context.Context, l *fileLock) {
			l.Lock()
			defer l.Unlock()
		},
		"RLock": func(_ context.Context, l *fileLock) {
			l.RLock()
			defer l.RUnlock()
		},
		"LockIn": func(ctx context.Context, l *fileLock) {
			if l.LockIn(ctx) == nil {
				l.Unlock()
			}
		},
		"RLockIn": func(ctx context.Context, l *fileLock) {
			if l.RLockIn(ctx) == nil {
				l.RUnlock()
			}
		},
		"LockLater": func(_ context.Context, l *fileLock) {
			l.LockLater()
			defer l.Unlock()
		},
		"LockLaterIn": func(ctx context.Context, l *fileLock) {
			if l.LockLaterIn(ctx) == nil {
				l.Unlock()
			}
		},
	} {
		for _, ends := range []bool{false, true} {
			l := new(fileLock)
			wait(t.Context(), l)
			require.False(t, l.Awaited(), name)
			ctx, cancel := context.WithCancel(t.Context())
			l.Lock()
			done := make(chan struct{})
			go func() {
				defer close(done)
				wait(ctx, l)
			}()
			if name == "LockLater" || name == "LockLaterIn" {
				require.Never(t, l.Awaited, 10*time.Millisecond, time.Millisecond, name)
			} else {
				require.Eventually(t, l.Awaited, 10*time.Second, time.Millisecond, name)
			}
			if ends {
				cancel()
			}
			l.Unlock()
			<-done
			require.Eventually(t, func() bool { return !l.Awaited() }, 10*time.Second, time.Millisecond, name)
			cancel()
		}
	}
}
