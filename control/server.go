package control

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// Options configures a Server. Cache and Socket are required; a number that is zero means its default.
type Options struct {
	// Socket is the absolute path of the socket, at most 103 bytes. Its directory is made if it is missing.
	Socket string
	// AllowOther lets other users connect. Their descriptors still decide what they may map.
	AllowOther bool
	// Cache makes the mappings.
	Cache Cache
	// Status returns the status for a viewer, which is marshalled to JSON. Nil: requests for it fail with ENOTSUP.
	Status func(Viewer) any
	// End ends the mount on a client's behalf. It returns when it has said everything, or when ctx ends. Its error is
	// for a client that it has not told anything yet. Nil: such requests fail with ENOTSUP.
	End func(ctx context.Context, r EndRequest) error
	// Record begins a recording of the mount's accesses. Nil: such requests fail with ENOTSUP.
	Record func() (*pagecache.Recording, error)
	// File answers a FILE; its result is marshalled to JSON. Its errors wrap a syscall.Errno; their text is shown to
	// the client's user. Nil: such requests fail with ENOTSUP.
	File func(context.Context, FileRequest) (any, error)
	// Profile makes a profile of this process. length applies to kinds that record for a time. Nil: such requests fail
	// with ENOTSUP.
	Profile func(ctx context.Context, kind ProfileKind, length time.Duration) ([]byte, error)
	// Live shows events to watchers. Nil: requests to watch fail with ENOTSUP.
	Live *live.Feed
	// Set changes settings, all of them or none, and returns a JSON document of all settings. Its errors wrap a
	// syscall.Errno; their text is shown to the client's user. Nil: such requests fail with ENOTSUP.
	Set func(context.Context, SetRequest) ([]byte, error)
	// Log gets sessions at debug level, and refusals and failures at higher levels. Nil: slog.Default.
	Log *slog.Logger

	// MaxSessions bounds the connections of all users, by default 4096. A user other than root and the daemon's own
	// gets at most a quarter of them; all such users together get at most seven eighths.
	MaxSessions int
	// MaxRequests bounds the running requests of a session, by default 128.
	MaxRequests int
	// MaxMappings bounds the mappings and open brackets of a session, by default 65536. For users other than root and
	// the daemon's own it also bounds those of all the user's sessions together.
	MaxMappings int
	// HandshakeTimeout is how long a new connection may stay silent, by default 5 s.
	HandshakeTimeout time.Duration
	// WriteTimeout is how long a frame may wait for a client that does not read, by default 10 s.
	WriteTimeout time.Duration
	// TokenLife is how long a grant can be redeemed, by default 30 s.
	TokenLife time.Duration

	// privileged reports whether a user has no limits. Nil: root and the daemon's user.
	privileged func(uid uint32) bool
	// endPatience is how long a bracket waits for the end of the client's earlier brackets, by default 100 ms. Such an
	// end blocks only if a file hangs.
	endPatience time.Duration
}

func (o *Options) setDefaults() {
	number := func(p *int, v int) {
		if *p <= 0 {
			*p = v
		}
	}
	duration := func(p *time.Duration, v time.Duration) {
		if *p <= 0 {
			*p = v
		}
	}
	number(&o.MaxSessions, 4096)
	number(&o.MaxRequests, 128)
	number(&o.MaxMappings, 1<<16)
	duration(&o.HandshakeTimeout, 5*time.Second)
	duration(&o.WriteTimeout, 10*time.Second)
	duration(&o.TokenLife, 30*time.Second)
	duration(&o.endPatience, 100*time.Millisecond)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.privileged == nil {
		o.privileged = mayAll
	}
}

// Grant is the answer of the ioctl: what a client needs to reach the server with a right to one open file.
type Grant struct {
	Token  [16]byte
	Socket string
}

// Stats counts what a Server holds at the moment.
type Stats struct {
	// Sessions is the number of connections whose client has said HELLO. ListenerOf makes others.
	Sessions int
	Mappings int
	// Attentive is the number of sessions whose clients read what the daemon sends first.
	Attentive int
	// Tokens is the number of grants that are neither redeemed nor forgotten.
	Tokens int
}

// Server serves clients on one socket. Its methods may be called from any goroutine.
type Server struct {
	opts     Options           // immutable
	listener *net.UnixListener // immutable
	link     string            // the link that Announce made; set before others use the Server
	tokens   *tokens
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	work     sync.WaitGroup // the accepting goroutine and the sessions
	draining atomic.Bool    // no more mappings are made
	endings  atomic.Uint64  // sessions that have ended
	// allowance bounds what users' requests keep.
	allowance allowance

	mu       sync.Mutex
	sessions map[*session]struct{} // guarded by mu
	users    map[uint32]*user      // users that have sessions; guarded by mu
	ordinary int                   // sessions of users who are not privileged; guarded by mu
	closed   bool                  // guarded by mu
}

// Listen binds the socket and starts to serve. It replaces a socket that a killed daemon left. EADDRINUSE if a daemon
// listens on it.
func Listen(o Options) (*Server, error) {
	o.setDefaults()
	if o.Cache == nil {
		return nil, errors.New("control: no page cache")
	}
	l, err := listen(o.Socket, o.AllowOther)
	if err != nil {
		return nil, err
	}
	s := &Server{
		opts:     o,
		listener: l,
		tokens:   newTokens(o.TokenLife),
		sessions: make(map[*session]struct{}),
		users:    make(map[uint32]*user),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.work.Go(s.accept)
	return s, nil
}

// Socket returns the path of the socket.
func (s *Server) Socket() string { return s.opts.Socket }

// Grant makes a single-use token for the open file src on behalf of user uid. The ioctl calls it. It does not block,
// and keeps src until the token is redeemed or expires. ESHUTDOWN after Close.
func (s *Server) Grant(src pagecache.Source, uid uint32) (Grant, error) {
	if src == nil {
		return Grant{}, syscall.EINVAL
	}
	return s.grant(src, uid)
}

// GrantStatus makes a single-use token for the mount's status, as Grant does for a file.
func (s *Server) GrantStatus(uid uint32) (Grant, error) { return s.grant(nil, uid) }

func (s *Server) grant(src pagecache.Source, uid uint32) (Grant, error) {
	user := int64(uid)
	if s.opts.privileged(uid) {
		user = privilegedUser
	}
	token, err := s.tokens.give(src, user)
	if err != nil {
		return Grant{}, err
	}
	return Grant{Token: token, Socket: s.opts.Socket}, nil
}

// Stats returns a snapshot of the counts.
func (s *Server) Stats() Stats {
	st := Stats{Tokens: s.tokens.count()}
	for _, ses := range s.snapshot() {
		if ses.greeted.Load() {
			st.Sessions++
		}
		st.Mappings += ses.mappingCount()
		if ses.attends() {
			st.Attentive++
		}
	}
	return st
}

func (s *Server) snapshot() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*session, 0, len(s.sessions))
	for ses := range s.sessions {
		all = append(all, ses)
	}
	return all
}

// Close removes the socket, ends every session, and waits until all mappings are unmapped. It may be called more than
// once.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	var err error
	if first {
		s.tokens.close()
		err = s.listener.Close()
		if s.link != "" {
			_ = os.Remove(s.link) // what is left, if this fails, leads nowhere
		}
		s.cancel()
		for _, ses := range s.snapshot() {
			ses.conn.Close()
		}
	}
	s.work.Wait()
	return err
}

// accept accepts connections until Close. If the machine is out of descriptors or memory, it waits and tries again.
func (s *Server) accept() {
	const firstWait, longestWait = 5 * time.Millisecond, time.Second
	wait := firstWait
	short := false
	for {
		conn, err := s.listener.AcceptUnix()
		switch {
		case err == nil:
			if short {
				s.opts.Log.Info("control: accepting connections again")
			}
			short, wait = false, firstWait
			s.start(conn)
			continue
		case s.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, syscall.ECONNABORTED):
			continue
		}
		if !short {
			short = true
			s.opts.Log.Error("control: cannot accept connections, will keep trying", "error", err)
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return
		}
		wait = min(2*wait, longestWait)
	}
}

// start begins a session, or refuses the connection with one frame.
func (s *Server) start(conn *net.UnixConn) {
	who, err := whoIs(conn)
	if err != nil {
		s.opts.Log.Warn("control: cannot tell which process has connected", "error", err)
		conn.Close()
		return
	}
	ses := newSession(s, conn, who)
	s.mu.Lock()
	why := s.admitLocked(ses)
	if why == "" {
		s.work.Go(ses.run)
	}
	s.mu.Unlock()
	if why == "" {
		return
	}
	s.opts.Log.Warn("control: connection refused: "+why, "pid", who.Pid, "uid", who.Uid)
	ses.refuse(syscall.EUSERS, why)
}

// whoIs returns the process that made the connection, as the kernel saw it at connect.
func whoIs(conn *net.UnixConn) (unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return unix.Ucred{}, err
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return unix.Ucred{}, err
	}
	if sockErr != nil {
		return unix.Ucred{}, sockErr
	}
	return *cred, nil
}
