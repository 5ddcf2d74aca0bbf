package control

import "time"

// SetPrivileged sets which users have no limits.
func (o *Options) SetPrivileged(is func(uid uint32) bool) { o.privileged = is }

// SetEndPatience sets how long a bracket waits for the end of earlier ones.
func (o *Options) SetEndPatience(d time.Duration) { o.endPatience = d }

// StatusReserve is how many connections beyond MaxSessions the privileged get.
const StatusReserve = statusReserve

// TellForTesting tells every client with a service connection about a change of a mapping.
func (s *Server) TellForTesting(mapping uint64) error {
	for _, ses := range s.snapshot() {
		ses.mu.Lock()
		v := ses.service
		ses.mu.Unlock()
		if v == nil {
			continue
		}
		if err := v.tell(notice{typ: typeInvalidated, body: invalidated{mappingID(mapping), 0,
			4096}.append}); err != nil {
			return err
		}
	}
	return nil
}

// Connections is how many connections there are, also those that have said nothing yet.
func (s *Server) Connections() int { return len(s.snapshot()) }

// Kept is how many bytes the running requests of ordinary users keep.
func (s *Server) Kept() int64 {
	s.allowance.mu.Lock()
	defer s.allowance.mu.Unlock()
	return s.allowance.kept
}

// MostKept is how many bytes the requests of one user may keep, and MostWatches how many watches one user may have.
const (
	MostKept    = mostKept
	MostWatches = mostWatches
)
