package control

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
)

// Program is a process that maps something, with all its connections. docs/status.md describes its JSON form.
type Program struct {
	Process uint32 `json:"process"`
	User    uint32 `json:"user"`
	// Name is the command's name when it was first found out; empty if it cannot be read.
	Name     string `json:"name"`
	Mappings int    `json:"mappings"`
	// Bytes is how much it maps. Bytes that it maps twice count twice.
	Bytes int64 `json:"mapped_bytes"`
	// Requests counts its requests of all kinds.
	Requests int64 `json:"requests"`
}

// Programs returns the processes that map something, by process ID. It does not block on files.
func (s *Server) Programs() []Program {
	type process struct{ pid, user uint32 }
	found := make(map[process]Program)
	for _, ses := range s.snapshot() {
		id := process{uint32(ses.who.Pid), ses.who.Uid}
		p := found[id]
		p.Process, p.User = id.pid, id.user
		p.Requests += ses.asked.Load()
		ses.mu.Lock()
		p.Mappings += len(ses.mappings)
		for _, m := range ses.mappings {
			p.Bytes += m.length
		}
		ses.mu.Unlock()
		if p.Mappings > 0 && p.Name == "" {
			p.Name, _ = ses.command()
		}
		found[id] = p
	}
	all := []Program{}
	for _, p := range found {
		if p.Mappings > 0 {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b Program) int {
		return cmp.Or(cmp.Compare(a.Process, b.Process), cmp.Compare(a.User, b.User))
	})
	return all
}

// commandOf returns the name of the command of the process that made the connection, or "" if it cannot be read. The
// process may have ended, and another one may have its number. commandOf fails if the daemon lacks what it needs to
// find out.
func commandOf(conn *net.UnixConn, pid int32) (string, error) {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if lacks(err) {
		return "", err
	}
	lives, unknown := peerLives(conn)
	if err != nil || !lives {
		return "", unknown
	}
	return strings.TrimSuffix(string(name), "\n"), nil
}
