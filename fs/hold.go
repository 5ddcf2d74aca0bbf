package fs

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// A mount is not to be unmounted while bytes wait to be brought home: umount(2) would return as if all were well. The kernel
// asks nobody before it unmounts, but it refuses with EBUSY while somebody has the mount open. So the server opens its own
// mountpoint for as long as bytes wait.
//
// The descriptor is of O_PATH, which sends the server no request, neither when it is opened nor when it is closed. Should the
// server be killed, it keeps nothing from ending: the connection is closed with the same process. But where somebody detached
// the mount meanwhile, closing the descriptor is what ends the mount, and the kernel has dirty pages written first. So that is
// done by a goroutine of its own, and nobody who answers requests waits for it.

// holds knows which descriptors are about to be closed.
type holds struct {
	mu      sync.Mutex
	closed  sync.Cond // of mu; signalled when closing becomes 0
	closing int       // protected by mu
}

// Hold keeps the mount from being unmounted until end is called, which does not block. Where the mountpoint cannot be opened,
// as when the mount is gone, it does nothing.
func (s *Server) Hold() (end func()) {
	fd, err := s.openRoot()
	if err != nil {
		s.fs.log.Debug("the mountpoint cannot be held", "error", err)
		return func() {}
	}
	h := &s.holds
	return func() {
		h.mu.Lock()
		h.closing++
		h.mu.Unlock()
		go func() {
			unix.Close(fd)
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.closing--; h.closing == 0 {
				h.closed.Broadcast()
			}
		}()
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

// WaitHolds returns once the holds that were ended keep the mount no more.
func (s *Server) WaitHolds() {
	s.holds.mu.Lock()
	defer s.holds.mu.Unlock()
	for s.holds.closing > 0 {
		s.holds.closed.Wait()
	}
}
