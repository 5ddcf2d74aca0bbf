package pagecache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// defaultStuckAfter is how long one hold of File.mu lasts before the file counts as stuck: its backing filesystem, or a
// device, does not answer. An ordinary hold is much shorter (package comment). A slow disk may exceed it; then others
// merely stop waiting for the file.
const defaultStuckAfter = 2 * time.Second

// fileLock is File.mu. It tells how long it has been held, so that nobody who works for several files has to wait for
// one that hangs.
type fileLock struct {
	rw      sync.RWMutex
	readers atomic.Int32
	// when the hold, or the first of several read holds, began: nanoseconds since lockEpoch, 0 for none
	since atomic.Int64
	ended atomic.Int64 // when the last read hold ended
}

var lockEpoch = time.Now()

// now is never 0.
func (l *fileLock) now() int64 { return int64(time.Since(lockEpoch)) | 1 }

func (l *fileLock) Lock() {
	l.rw.Lock()
	l.since.Store(l.now())
}

// LockIn is Lock, unless ctx ends before: then it returns the error of ctx, and the lock is not held.
func (l *fileLock) LockIn(ctx context.Context) error {
	return l.waitIn(ctx, l.TryLock, l.Lock, l.Unlock)
}

// LockOr is LockIn after which, where it fails, somebody else calls late with the lock held, as soon as he gets it.
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

// waitIn has a goroutine wait, who lets go of the lock again where nobody wants it any more.
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

// whenFree calls do with mu held. Where ctx ends before mu is free, the caller goes on, and do is called later.
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
	l.rw.RLock()
	l.noteReader()
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

// heldFor returns how long the lock has been held without a break. Readers who come and go, so that there is always
// one, are no single hold: it counts from the last that ended. One of them that hangs shows once somebody wants the
// lock, who lets no others in.
func (l *fileLock) heldFor() time.Duration {
	since := l.since.Load()
	if since == 0 {
		return 0
	}
	return max(time.Duration(l.now()-max(since, l.ended.Load())), 0)
}

// notAnswered says for how long a file that is being waited for has not answered.
func (f *File) notAnswered() error {
	if f.mu.heldFor() == 0 {
		return fail(syscall.ETIMEDOUT, "it waits behind others of its backing filesystem, which do not answer")
	}
	return fail(syscall.ETIMEDOUT, "its backing filesystem, or a device, has not answered for %.1f s",
		f.mu.heldFor().Seconds())
}

// stuck reports whether whoever holds mu seems to wait for something that does not answer.
func (f *File) stuck() bool { return f.mu.heldFor() >= f.c.stuckAfter }

// impatience is by how much less than others a file is waited for whose backing filesystem has one that is stuck.
const impatience = 32

// seemsStuck is stuck for those who can do without f: where its backing filesystem hangs, they wait once, and not once
// for each of its files.
func (f *File) seemsStuck() bool {
	if held := f.mu.heldFor(); held < f.c.stuckAfter/impatience || held >= f.c.stuckAfter {
		return held >= f.c.stuckAfter
	}
	return slices.ContainsFunc(f.c.snapshotFiles(), func(g *File) bool { return g.id.Dev == f.id.Dev && g.stuck() })
}
