package fs

import (
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// A mount is not to be unmounted while bytes wait to be brought home: umount(2) would return as if all were well. The
// kernel asks nobody before it unmounts, but it refuses with EBUSY while somebody has the mount open. So the server
// opens its own mountpoint for as long as bytes wait.
//
// The descriptor is of O_PATH, which sends the server no request, neither when it is opened nor when it is closed.
// Should the server be killed, it keeps nothing from ending: the connection is closed with the same process. But where
// somebody detached the mount meanwhile, closing the descriptor is what ends the mount, and the kernel has dirty pages
// written first. And the way to the mountpoint may lead over a filesystem that hangs. So goroutines of their own open
// and close it, and nobody who answers requests waits for them.

// hold is the descriptor that keeps the mount.
type hold struct {
	mu      sync.Mutex
	closed  sync.Cond     // of mu; signalled when closing becomes 0
	wanted  bool          // protected by mu
	fd      int           // -1 for none; protected by mu
	opening chan struct{} // closed when the attempt under way is over; nil while there is none; protected by mu
	closing int           // descriptors that are about to be closed; protected by mu
}

// Hold keeps the mount from being unmounted until LetGo, as soon as held is closed. It does not block. Where the
// mountpoint cannot be opened, as when the mount is gone, held is closed all the same.
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

// LetGo ends Hold. It does not block; WaitHolds waits.
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

// WaitHolds returns once descriptors that LetGo gave up keep the mount no more.
func (s *Server) WaitHolds() {
	s.hold.mu.Lock()
	defer s.hold.mu.Unlock()
	for s.hold.closing > 0 {
		s.hold.closed.Wait()
	}
}

// openRoot opens the root of the mount without asking the server.
func (s *Server) openRoot() (int, error) {
	fd, err := unix.Open(s.mountpoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if device := fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor); device != s.device {
		unix.Close(fd)
		return -1, fmt.Errorf("%s is on device %s, and not on the mount's, %s", s.mountpoint, device, s.device)
	}
	return fd, nil
}

// watchPlace has Options.Detached called whenever the mount disappears from the mounts that this process sees, or
// appears again.
func (s *Server) watchPlace(detached func(bool)) {
	if detached == nil || s.device == "" {
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

// isAmong reports whether the mount is among mounts. One that was not listed is looked for again: kernels before 5.8
// may leave mounts out while others are unmounted.
func (s *Server) isAmong(mounts []MountInfo) bool {
	here := func(m MountInfo) bool { return m.Device == s.device }
	if slices.ContainsFunc(mounts, here) {
		return true
	}
	again, err := readMounts()
	return err != nil || slices.ContainsFunc(again, here)
}
