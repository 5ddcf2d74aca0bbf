package gpubackend

import "sync"

// Users counts the calls that use a memory, so that Memory.Free can wait for them. The zero value has none. Its methods
// may be called from any goroutine.
type Users struct {
	mu    sync.Mutex
	n     int           // protected by mu
	freed bool          // protected by mu; no further call is let in
	idle  chan struct{} // protected by mu; closed when n falls to 0 after freed was set
}

// Begin lets a call in, which must end with End. After Free it returns ErrFreed.
func (u *Users) Begin() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.freed {
		return ErrFreed
	}
	u.n++
	return nil
}

// End ends a call that Begin let in.
func (u *Users) End() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n--
	if u.n == 0 && u.idle != nil {
		close(u.idle)
	}
}

// Freed reports whether Free was called.
func (u *Users) Freed() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.freed
}

// Free lets no further call in, and blocks until those that were let in have ended. A second Free returns ErrFreed at
// once.
func (u *Users) Free() error {
	u.mu.Lock()
	if u.freed {
		u.mu.Unlock()
		return ErrFreed
	}
	u.freed = true
	var idle chan struct{}
	if u.n > 0 {
		idle = make(chan struct{})
		u.idle = idle
	}
	u.mu.Unlock()
	if idle != nil {
		<-idle
	}
	return nil
}
