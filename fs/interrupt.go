package fs

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// killedLooks is the interval at which the daemon checks whether a signalled thread is being killed.
	killedLooks = 50 * time.Millisecond
	// quietLooks is the interval for a thread without a reported signal.
	quietLooks = time.Second
)

// request is the context of a FUSE request. It ends when the thread that made the request is being killed: nothing will
// read the answer, and the thread cannot end before it gets one.
//
// Other signals do not end it. The kernel announces the first signal (INTERRUPT), even one that a program handles and
// then continues. Programs do not expect reads and writes of files to fail with EINTR. For direct reads and writes,
// which the kernel sends as asynchronous requests, it announces no signal.
type request struct {
	interrupted <-chan struct{} // closed by INTERRUPT
	thread      uint32

	mu     sync.Mutex
	done   chan struct{} // protected by mu; nil before the first call of Done
	killed bool          // protected by mu
	over   chan struct{} // protected by mu; closed by end; nil if Done was not called
	looked time.Time     // protected by mu; when Err last looked
}

var _ context.Context = (*request)(nil)

// newRequest returns the context of a request with go-fuse's cancel channel. Call end when the request is answered.
func newRequest(cancel <-chan struct{}, who *fuse.Caller) *request {
	return &request{interrupted: cancel, thread: who.Pid}
}

// end stops watching the thread.
func (r *request) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over != nil {
		close(r.over)
		r.over = nil
	}
}

// Deadline implements context.Context.
func (r *request) Deadline() (time.Time, bool) { return time.Time{}, false }

// Value implements context.Context.
func (r *request) Value(any) any { return nil }

// Done implements context.Context. The first call starts a goroutine, which ends with the request.
func (r *request) Done() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done == nil {
		r.done = make(chan struct{})
		if r.killed {
			close(r.done)
			return r.done
		}
		r.over = make(chan struct{})
		go r.watch(r.over)
	}
	return r.done
}

// Err implements context.Context.
func (r *request) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wasInterrupted() {
		if now := time.Now(); now.Sub(r.looked) >= killedLooks {
			r.looked = now
			r.lookLocked()
		}
	}
	if r.killed {
		return context.Canceled
	}
	return nil
}

func (r *request) wasInterrupted() bool {
	select {
	case <-r.interrupted:
		return true
	default:
		return false
	}
}

// watch watches the thread until the request is over.
func (r *request) watch(over <-chan struct{}) {
	interrupted, wait := r.interrupted, quietLooks
	for {
		timer := time.NewTimer(wait)
		select {
		case <-interrupted:
			interrupted, wait = nil, killedLooks
		case <-timer.C:
		case <-over:
			timer.Stop()
			return
		}
		timer.Stop()
		r.mu.Lock()
		r.lookLocked()
		killed := r.killed
		r.mu.Unlock()
		if killed {
			return
		}
	}
}

// lookLocked ends the context if the thread is being killed.
func (r *request) lookLocked() {
	if r.killed || !isBeingKilled(r.thread) {
		return
	}
	r.killed = true
	if r.done != nil {
		close(r.done)
	}
}

// isBeingKilled reports whether a thread has a fatal signal: for such a signal, the kernel sends SIGKILL to each thread
// of the process. It returns false if the daemon cannot see the thread.
func isBeingKilled(thread uint32) bool {
	if thread == 0 {
		return false
	}
	hex, _ := procStatus(strconv.FormatUint(uint64(thread), 10), "SigPnd:")
	pending, err := strconv.ParseUint(hex, 16, 64)
	return err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
}
