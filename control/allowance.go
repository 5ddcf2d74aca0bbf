package control

import (
	"context"
	"net"
	"sync"
	"syscall"
	"time"
)

// Limits of the bytes that the running requests of ordinary users keep beyond a frame each: of one user, and of all.
const (
	mostKept    = maxLarge
	mostAllKept = 4 * mostKept
	// keptPatience is how long the daemon stops reading a connection, until earlier requests of the user end. Then the
	// request fails, because those may need a request that is still unread.
	keptPatience = 2 * time.Second
)

// allowance bounds the bytes of large requests and answers. They are counted before they are kept.
type allowance struct {
	mu    sync.Mutex
	kept  int64         // guarded by mu, as is user.kept
	freed chan struct{} // closed when bytes are given back; nil while nobody waits. Guarded by mu
}

// take counts n more bytes of a user, at most mostKept, and waits while there is no room. EAGAIN if that takes too
// long. Users without limits never wait.
func (a *allowance) take(ctx context.Context, u *user, n int64) error {
	if n == 0 || u.slots == nil {
		return nil
	}
	timeout := time.NewTimer(keptPatience)
	defer timeout.Stop()
	for {
		freed := a.tryTake(u, n)
		if freed == nil {
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return net.ErrClosed
		case <-timeout.C:
			return failure(syscall.EAGAIN, "the request keeps %d KiB, and the running requests of one user may keep %d MiB, "+
				"those of all %d MiB; try again", n>>10, mostKept>>20, mostAllKept>>20)
		}
	}
}

// keep sets how many bytes a running request of a session keeps. EAGAIN as from take.
func (a *allowance) keep(s *session, id requestID, n int64) error {
	set := func(n int64) (was int64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		was, s.running[id] = s.running[id], n
		return was
	}
	n = min(n, mostKept)
	a.give(s.user, set(0))
	err := a.take(s.ctx, s.user, n)
	if err == nil {
		set(n)
	}
	return err
}

// tryTake counts n bytes, or returns a channel that is closed when it is worth trying again.
func (a *allowance) tryTake(u *user, n int64) (freed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if u.kept+n <= mostKept && a.kept+n <= mostAllKept {
		u.kept += n
		a.kept += n
		return nil
	}
	if a.freed == nil {
		a.freed = make(chan struct{})
	}
	return a.freed
}

// give gives bytes back.
func (a *allowance) give(u *user, n int64) {
	if n == 0 || u.slots == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	u.kept -= n
	a.kept -= n
	if a.freed != nil {
		close(a.freed)
		a.freed = nil
	}
}
