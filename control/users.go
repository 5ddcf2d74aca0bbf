package control

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Limits of users. Root and the user who mounted are privileged: they have no limits of their own, and a reserve.
// Otherwise other users could prevent them from reading the status and from ending the mount.
const (
	// An ordinary user gets at most 1/userShare of MaxSessions. All of them together leave 1/othersLeft free.
	userShare  = 4
	othersLeft = 8
	// statusReserve is how many connections beyond MaxSessions the privileged get. They can only be used for the
	// status.
	statusReserve = 16
	// userRequests times Options.MaxRequests is how many requests an ordinary user may run at once, on all connections.
	userRequests = 32
)

// user is what the sessions of one user id use.
type user struct {
	sessions int // guarded by Server.mu
	mappings int // including those being made; guarded by Server.mu
	// slots has an element for each running request. nil for privileged users, whose requests are not limited.
	slots chan struct{}
	// kept is the bytes that running requests keep; see allowance.
	kept int64
	// stuck counts descriptors that are being closed; see large.go. Guarded by Server.mu.
	stuck int
	// watches counts the running WATCHes. Guarded by Server.mu.
	watches int
	// waiting is how many requests wait for a version. Guarded by Server.mu.
	waiting int
}

// mayAll reports whether a user may see and use everything.
func mayAll(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

// admitLocked counts a session, or returns why it is refused. It sets statusOnly if the session may only ask for the
// status. Server.mu is held.
func (s *Server) admitLocked(ses *session) (why string) {
	uid := ses.who.Uid
	ordinary := !s.opts.privileged(uid)
	u := s.users[uid]
	if u == nil {
		u = &user{}
		if ordinary {
			u.slots = make(chan struct{}, userRequests*s.opts.MaxRequests)
		}
	}
	most, total := s.opts.MaxSessions, len(s.sessions)
	switch {
	case s.closed:
		return "gaiafs is shutting down"
	case ordinary && u.sessions >= max(most/userShare, 1):
		return "too many clients of this user are connected"
	case ordinary && s.ordinary >= max(most-most/othersLeft, 1), ordinary && total >= most, total >= most+statusReserve:
		return "too many clients are connected"
	}
	ses.user, ses.ordinary, ses.statusOnly = u, ordinary, total >= most
	s.users[uid] = u
	s.sessions[ses] = struct{}{}
	u.sessions++
	if ordinary {
		s.ordinary++
	}
	return ""
}

// ended removes a session whose mappings are unmapped.
func (s *Server) ended(ses *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.discountLocked(ses)
	s.endings.Add(1)
	close(ses.ended)
}

// discountLocked removes a session from the counts, once. Server.mu is held.
func (s *Server) discountLocked(ses *session) {
	if _, counted := s.sessions[ses]; !counted {
		return
	}
	delete(s.sessions, ses)
	if ses.ordinary {
		s.ordinary--
	}
	if ses.user.sessions--; ses.user.sessions == 0 {
		delete(s.users, ses.who.Uid)
	}
}

// reserveMapping counts a new mapping or bracket of the session's user. ENOMEM if there are too many. dropMapping
// undoes it.
func (s *session) reserveMapping() error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	if most := s.server.opts.MaxMappings; s.ordinary && s.user.mappings >= most {
		return failure(syscall.ENOMEM, "the processes of this user already have %d mappings and open brackets", most)
	}
	s.user.mappings++
	return nil
}

func (s *session) dropMapping() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.user.mappings--
}

// Viewer is the client that asks for the status.
type Viewer struct {
	// All means that it is root or the user who mounted, who may know everything.
	All  bool
	User uint32
	// mine has the files that the user's processes map.
	mine map[pagecache.FileID]bool
}

// Knows reports whether the viewer may see the file's name. Users may see the names of files that they map. Which
// directories they may read is not checked.
func (v Viewer) Knows(id pagecache.FileID) bool { return v.All || v.mine[id] }

// viewer returns the session's client as a Viewer.
func (s *session) viewer() Viewer {
	v := Viewer{All: !s.ordinary, User: s.who.Uid, mine: make(map[pagecache.FileID]bool)}
	if v.All {
		return v
	}
	for _, other := range s.server.snapshot() {
		if other.who.Uid == s.who.Uid {
			other.addFiles(v.mine)
		}
	}
	return v
}

// addFiles adds the files that the session maps.
func (s *session) addFiles(files map[pagecache.FileID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.mappings {
		for _, id := range m.files {
			files[id] = true
		}
	}
}

// cgroupOf returns the cgroup in the unified hierarchy (cgroups(7)) of the process that made the connection. It returns
// "" if the process has none or may not be seen. It fails if the process has ended: its number may belong to another
// process, and the connection to a third. It also fails if the daemon lacks what it needs to find out.
func cgroupOf(conn *net.UnixConn, pid int32) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if pid != 0 {
		lives, unknown := peerLives(conn)
		if lacks(err) {
			unknown = err
		}
		switch {
		case unknown != nil:
			return "", fmt.Errorf("the cgroup of process %d is not known: %w", pid, unknown)
		case !lives || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH):
			return "", fmt.Errorf("process %d, which made the connection, has ended, so its cgroup is not known", pid)
		}
	}
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			return strings.TrimSuffix(path, " (deleted)"), nil
		}
	}
	return "", nil
}

// lacks reports whether err says that the daemon or the machine has too few descriptors or too little memory. Later,
// the call may succeed.
func lacks(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// peerLives reports whether the process that made the connection has not ended, or true on Linux before 6.5.
func peerLives(conn *net.UnixConn) (lives bool, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false, err
	}
	closed := raw.Control(func(fd uintptr) {
		var pidfd int
		if pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			return
		}
		defer unix.Close(pidfd)
		var n int
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
		lives = n == 0
	})
	switch {
	case closed != nil:
		return false, closed
	case err == unix.ENOPROTOOPT:
		return true, nil
	case lacks(err):
		return false, err
	}
	return lives && err == nil, nil // other errors: the process is gone
}

// untilKnown returns a function that calls find until it succeeds, and from then on returns what that found.
func untilKnown(find func() (string, error)) func() (string, error) {
	var mu sync.Mutex
	var known bool
	var found string // protected by mu, as is known
	return func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		if known {
			return found, nil
		}
		x, err := find()
		found, known = x, err == nil
		return found, err
	}
}
