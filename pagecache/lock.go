package pagecache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// defaultStuckAfter is the length of one hold of File.mu after which the file counts as stuck: its backing filesystem
// or a device does not answer. Ordinary holds are much shorter (package comment). A slow disk may cause a longer hold;
// then others just stop waiting for the file.
const defaultStuckAfter = 2 * time.Second

// fileLock is File.mu. It tells how long it has been held, so that work on several files need not wait for a file that
// hangs.
type fileLock struct {
	rw      sync.RWMutex
	readers atomic.Int32
	// when the hold, or the first of several overlapping read holds, began: nanoseconds since lockEpoch; 0 for none
	since   atomic.Int64
	ended   atomic.Int64 // when the last read hold ended
	waiting atomic.Int32 // callers of Lock and RLock that wait
}

var lockEpoch = time.Now()

// now returns the nanoseconds since lockEpoch. It is never 0.
func (l *fileLock) now() int64 { return int64(time.Since(lockEpoch)) | 1 }

func (l *fileLock) Lock() {
	if !l.TryLock() {
		l.waiting.Add(1)
		l.LockLater()
		l.waiting.Add(-1)
	}
}

// LockLater is Lock for work that no program waits for. Its wait does not make the lock Awaited.
func (l *fileLock) LockLater() {
	l.rw.Lock()
	l.since.Store(l.now())
}

// LockLaterIn is LockIn for such work.
func (l *fileLock) LockLaterIn(ctx context.Context) error {
	return l.waitIn(ctx, l.TryLock, l.LockLater, l.Unlock)
}

// Awaited reports whether a program waits for the lock.
func (l *fileLock) Awaited() bool { return l.waiting.Load() > 0 }

// LockIn locks like Lock. If ctx ends first, it returns the error of ctx, and the lock is not held.
func (l *fileLock) LockIn(ctx context.Context) error {
	return l.waitIn(ctx, l.TryLock, l.Lock, l.Unlock)
}

// LockOr is LockIn, but if ctx ends first, late is called later with the lock held.
func (l *fileLock) LockOr(ctx context.Context, late func()) error {
	return l.waitIn(ctx, l.TryLock, l.Lock, func() {
		late()
		l.Unlock()
	})
}

// RLockIn is LockIn for RLock.
func (l *fileLock) RLockIn(ctx context.Context) error {
	return l.waitIn(ctx, l.TryRLock, l.RLock, l.RUnlock)
}

// waitIn locks in a goroutine of its own, which unlocks again if ctx ended first.
func (l *fileLock) waitIn(ctx context.Context, try func() bool, lock, unlock func()) error {
	if try() {
		return nil
	}
	ended := ctx.Done()
	if ended == nil {
		lock()
		return nil
	}
	held := make(chan struct{})
	go func() {
		lock()
		select {
		case held <- struct{}{}:
		case <-ended:
			unlock()
		}
	}()
	select {
	case <-held:
		return nil
	case <-ended:
		return ctx.Err()
	}
}

// whenFree calls do with mu held. If ctx ends before mu is free, whenFree returns, and do is called later.
func (f *File) whenFree(ctx context.Context, do func()) {
	if f.mu.LockOr(ctx, do) == nil {
		defer f.mu.Unlock()
		do()
	}
}

func (l *fileLock) TryLock() bool {
	if !l.rw.TryLock() {
		return false
	}
	l.since.Store(l.now())
	return true
}

func (l *fileLock) Unlock() {
	l.since.Store(0)
	l.rw.Unlock()
}

func (l *fileLock) RLock() {
	if !l.TryRLock() {
		l.waiting.Add(1)
		l.rw.RLock()
		l.waiting.Add(-1)
		l.noteReader()
	}
}

func (l *fileLock) TryRLock() bool {
	if !l.rw.TryRLock() {
		return false
	}
	l.noteReader()
	return true
}

func (l *fileLock) noteReader() {
	if l.readers.Add(1) == 1 {
		l.since.Store(l.now())
	}
}

func (l *fileLock) RUnlock() {
	l.ended.Store(l.now())
	since := l.since.Load()
	if l.readers.Add(-1) == 0 {
		l.since.CompareAndSwap(since, 0) // another reader may have come and noted its own time
	}
	l.rw.RUnlock()
}

// heldFor returns how long the current hold has lasted. Overlapping read holds do not add up: the time counts from the
// last one that ended. A reader that hangs shows once a writer waits, because then no other readers get in.
func (l *fileLock) heldFor() time.Duration {
	since := l.since.Load()
	if since == 0 {
		return 0
	}
	return max(time.Duration(l.now()-max(since, l.ended.Load())), 0)
}

// notAnswered returns the error of a wait for a file that did not answer. It says for how long.
func (f *File) notAnswered() error {
	if f.mu.heldFor() == 0 {
		return fail(syscall.ETIMEDOUT, "it waits behind other files of its backing filesystem, which do not answer")
	}
	return fail(syscall.ETIMEDOUT, "its backing filesystem, or a device, has not answered for %.1f s",
		f.mu.heldFor().Seconds())
}

// stuck reports whether the holder of mu seems to wait for something that does not answer.
func (f *File) stuck() bool { return f.mu.heldFor() >= f.c.stuckAfter }

// impatience divides stuckAfter for a file whose backing filesystem has a stuck file already.
const impatience = 32

// seemsStuck is stuck for callers that can do without f. If a backing filesystem hangs, they wait in full for one of
// its files, and only briefly for the others.
func (f *File) seemsStuck() bool {
	if held := f.mu.heldFor(); held < f.c.stuckAfter/impatience || held >= f.c.stuckAfter {
		return held >= f.c.stuckAfter
	}
	return slices.ContainsFunc(f.c.snapshotFiles(), func(g *File) bool { return g.id.Dev == f.id.Dev && g.stuck() })
}
