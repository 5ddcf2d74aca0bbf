package control

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Limits of users. Root and the user who mounted are privileged: they have none of their own, and a reserve, since
// whoever could keep them out would keep them from looking and from ending the mount. Ordinary users have
const (
	// a share of MaxSessions for each, and one for all of them together;
	userShare  = 4 // a quarter
	othersLeft = 8 // all but an eighth
	// so many connections beyond MaxSessions for the privileged alone, which are good for the status;
	statusReserve = 16
	// so many requests at once, of all connections, per request of Options.MaxRequests.
	userRequests = 32
)

// user is what the sessions of one user id take.
type user struct {
	sessions int // guarded by Server.mu
	mappings int // and those being made; guarded by Server.mu
	// slots has an element for each request that runs, where their number is limited. It is nil for the privileged.
	slots chan struct{}
	// large is held while the long body of a request is read and decoded, stuck counts descriptors that are being
	// closed; see large.go. stuck is guarded by Server.mu.
	large sync.Mutex
	stuck int
	// waiting is how many requests wait for a version. Guarded by Server.mu.
	waiting int
}

// mayAll reports whether a user may see and use everything.
func mayAll(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

// admitLocked counts a session, or returns why there may be none. It sets statusOnly where the session is good for the
// status only. Server.mu is held.
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

// ended forgets a session whose mappings are gone.
func (s *Server) ended(ses *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.discountLocked(ses)
	s.endings.Add(1)
	close(ses.ended)
}

// discountLocked takes a session out of the counts, once. Server.mu is held.
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

// reserveMapping counts a mapping of the session's user that is about to be made, or a bracket. dropMapping takes it
// back.
func (s *session) reserveMapping() error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	if most := s.server.opts.MaxMappings; s.ordinary && s.user.mappings >= most {
		return failure(syscall.ENOMEM, "the processes of this user have %d mappings and open brackets already", most)
	}
	s.user.mappings++
	return nil
}

func (s *session) dropMapping() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.user.mappings--
}

// Viewer is who asks for the status.
type Viewer struct {
	// All says that it is root or the user who mounted, who may know everything.
	All  bool
	User uint32
	// mine has the files that the user's processes map.
	mine map[pagecache.FileID]bool
}

// Knows reports whether the viewer may be told the file's name. A user knows the names of files that she maps; the
// status does not look which directories she may read.
func (v Viewer) Knows(id pagecache.FileID) bool { return v.All || v.mine[id] }

// viewer returns who the session's client is.
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

// cgroupOf returns the cgroup of a process in the unified hierarchy (cgroups(7)), or "" where it cannot be told.
func cgroupOf(pid int32) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			return strings.TrimSuffix(path, " (deleted)")
		}
	}
	return ""
}
