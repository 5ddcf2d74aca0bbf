package pagecache

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
)

// lifetime is the lifetime of a client's window on device memory: a Mapping or a ViewMapping.
type lifetime struct {
	// life ends with the window, and so does the window's background work. calls counts the calls that use the extents.
	life    context.Context
	end     context.CancelFunc
	calls   sync.WaitGroup
	callsMu sync.Mutex // guards calls.Add against calls.Wait
	gone    atomic.Bool
	ended   sync.Once
	// saw is how often the last writer of groups of the window's files had ended when the window was made. Immutable
	// then.
	saw uint64
	// abandoned says that the client ended without unmapping.
	abandoned atomic.Bool
}

// Abandon notes that the client ended without unmapping. Its kernels may go on storing into the memory for a while.
// Call it before Unmap.
func (l *lifetime) Abandon() { l.abandoned.Store(true) }

func (l *lifetime) start() { l.life, l.end = context.WithCancel(context.Background()) }

// enter counts a call that uses extents on dev. The caller ends it with calls.Done.
func (l *lifetime) enter(dev *device) error {
	l.callsMu.Lock()
	defer l.callsMu.Unlock()
	if l.gone.Load() {
		return fail(syscall.EINVAL, "the mapping has ended")
	}
	if err := dev.gone(); err != nil {
		return err
	}
	l.calls.Add(1)
	return nil
}

// finish refuses further calls and waits for those in progress.
func (l *lifetime) finish() {
	l.end()
	l.callsMu.Lock()
	l.gone.Store(true)
	l.callsMu.Unlock()
	l.calls.Wait()
}
