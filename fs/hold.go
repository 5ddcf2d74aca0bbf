package fs

import (
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// A mount must not be unmounted while bytes wait to be written home: umount(2) would return as if all were well. The
// kernel does not ask before it unmounts, but it refuses with EBUSY while a process has the mount open. So the server
// opens its own mountpoint as long as bytes wait.
//
// The descriptor is an O_PATH one, so neither opening nor closing it sends the server a request. If the server is
// killed, the descriptor keeps nothing alive: the connection closes with the same process. But if the mount was
// detached, closing the descriptor ends the mount, and the kernel writes dirty pages first. And the path to the
// mountpoint may cross a filesystem that hangs. So separate goroutines open and close it, and no request handler waits
// for them.

// hold is the descriptor that keeps the mount from being unmounted.
type hold struct {
	mu      sync.Mutex
	closed  sync.Cond     // of mu; signalled when closing becomes 0
	wanted  bool          // protected by mu
	fd      int           // -1 for none; protected by mu
	opening chan struct{} // closed when the attempt to open ends; nil if there is none; protected by mu
	closing int           // descriptors that are being closed; protected by mu
}

// Hold keeps the mount from being unmounted until LetGo, from the moment held is closed. It does not block. held is
// closed even if the mountpoint cannot be opened, for example because the mount is gone.
func (s *Server) Hold() (held <-chan struct{}) {
	h := &s.hold
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wanted = true
	switch {
	case h.fd >= 0:
		done := make(chan struct{})
		close(done)
		return done
	case h.opening == nil:
		h.opening = make(chan struct{})
		go s.openHold()
	}
	return h.opening
}

// LetGo undoes Hold. It does not block; WaitHolds waits for its effect.
func (s *Server) LetGo() {
	h := &s.hold
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.wanted = false; h.fd >= 0 {
		h.closing++
		go h.close(h.fd)
		h.fd = -1
	}
}

func (s *Server) openHold() {
	fd, err := s.openRoot()
	if err != nil {
		s.fs.log.Debug("the mountpoint cannot be held", "error", err)
	}
	h := &s.hold
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.opening)
	h.opening = nil
	switch {
	case err != nil:
	case h.wanted:
		h.fd = fd
	default:
		h.closing++
		go h.close(fd)
	}
}

func (h *hold) close(fd int) {
	unix.Close(fd)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing--; h.closing == 0 {
		h.closed.Broadcast()
	}
}

// WaitHolds returns when the descriptors that LetGo gave up are closed.
func (s *Server) WaitHolds() {
	s.hold.mu.Lock()
	defer s.hold.mu.Unlock()
	for s.hold.closing > 0 {
		s.hold.closed.Wait()
	}
}

// openRoot opens the root of the mount without a request to the server.
func (s *Server) openRoot() (int, error) {
	fd, err := unix.Open(s.mountpoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	device, err := deviceOf(fd)
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	if device != s.device {
		unix.Close(fd)
		return -1, fmt.Errorf("%s is on device %s, not on the mount's device %s", s.mountpoint, device, s.device)
	}
	return fd, nil
}

// watchPlace makes Options.Detached called whenever the mount disappears from the mounts that this process sees, or
// appears again.
func (s *Server) watchPlace(detached func(bool)) {
	if detached == nil {
		return
	}
	was := false
	s.fs.strict.follow(func(mounts []MountInfo) {
		if is := !s.isAmong(mounts); is != was {
			was = is
			detached(is)
		}
	})
}

// isAmong reports whether the mount is among mounts. If it is not, isAmong reads the mounts again: kernels before 5.8
// may leave mounts out of the list during an unmount.
func (s *Server) isAmong(mounts []MountInfo) bool {
	here := func(m MountInfo) bool { return m.Device == s.device }
	if slices.ContainsFunc(mounts, here) {
		return true
	}
	again, err := readMounts()
	return err != nil || slices.ContainsFunc(again, here)
}
