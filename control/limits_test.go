package control

import (
	"context"
	"log/slog"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// TestConnectionsOfManyUsers: ordinary users together leave some connections to the privileged.
func TestConnectionsOfManyUsers(t *testing.T) {
	s := &Server{sessions: make(map[*session]struct{}), users: make(map[uint32]*user)}
	s.opts.MaxSessions, s.opts.Log = 16, slog.New(slog.DiscardHandler)
	s.opts.privileged = func(uid uint32) bool { return uid == 0 }
	admits := func(uid uint32) bool {
		return s.admitLocked(&session{server: s, who: unix.Ucred{Uid: uid}}) == ""
	}
	for uid := range uint32(14) {
		require.True(t, admits(1000+uid))
	}
	require.False(t, admits(2000))
	for range 2 + statusReserve {
		require.True(t, admits(0))
	}
	require.False(t, admits(0))
}

// TestRequestsThatWaitForAVersion: a user may have so many, and no more.
func TestRequestsThatWaitForAVersion(t *testing.T) {
	s := &session{server: &Server{}, user: &user{waiting: maxWaiting}}
	require.ErrorIs(t, s.awaitVersion(nil, 1, 0), syscall.EAGAIN)
	require.Equal(t, maxWaiting, s.user.waiting)
}

// abortedGroup is a group whose mapping has ended.
type abortedGroup struct{ Group }

func (abortedGroup) Release(context.Context) (version uint64, pages int64, err error) {
	return 0, 0, syscall.ECANCELED
}

// TestAbortedGroupsAreDropped: a session keeps no group that was aborted.
func TestAbortedGroupsAreDropped(t *testing.T) {
	s := &session{groups: map[groupID]Group{1: abortedGroup{}}}
	_, err := s.serveReleaseGroup(1)
	require.ErrorIs(t, err, syscall.ECANCELED)
	require.Empty(t, s.groups)
}

// null returns an open file, and a function that reports whether it is open still.
func null(t *testing.T) (f *os.File, open func() bool) {
	t.Helper()
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f, func() bool {
		_, err := f.Stat()
		return err == nil
	}
}

// TestNoticesThatAreNotSent: the memory that comes with a notice is closed if the notice is never sent.
func TestNoticesThatAreNotSent(t *testing.T) {
	newService := func() *service {
		return &service{
			wake: make(chan struct{}, 1), over: make(chan struct{}), asked: make(map[requestID]chan<- answer),
		}
	}
	for name, send := range map[string]func(f *os.File) error{
		"no service connection": func(f *os.File) error {
			_, err := (&movingClient{session: new(session)}).Move(pagecache.Move{Descriptor: f})
			return err
		},
		"it has ended": func(f *os.File) error {
			v := newService()
			v.end()
			return v.tell(notice{file: f})
		},
		"it ends": func(f *os.File) error {
			v := newService()
			err := v.tell(notice{file: f})
			v.end()
			return err
		},
		"the client does not read": func(f *os.File) error {
			v := newService()
			for range mostNotices {
				require.NoError(t, v.tell(notice{}))
			}
			return v.tell(notice{file: f})
		},
	} {
		f, open := null(t)
		err := send(f)
		require.False(t, open(), "%s: %v", name, err)
	}
}

// TestLateAnswers: a client that does not answer in time is inattentive until it answers.
func TestLateAnswers(t *testing.T) {
	v := &service{wake: make(chan struct{}, 1), asked: make(map[requestID]chan<- answer), attentive: true}
	wait, err := v.ask(notice{})
	require.NoError(t, err)
	now, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = wait(now)
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, v.attentive)
	v.queue = nil // write has sent it
	require.NoError(t, v.answered(1, answer{}))
	require.True(t, v.attentive)
	_, err = wait(t.Context())
	require.NoError(t, err)
}

// TestMemoryOfAClientThatEndedMeanwhile: a request that found no memory is tried again if a client ended since it
// looked.
func TestMemoryOfAClientThatEndedMeanwhile(t *testing.T) {
	s, calls := &session{server: &Server{}, ctx: t.Context()}, 0
	require.NoError(t, s.patiently(func() error {
		if calls++; calls > 1 {
			return nil
		}
		s.server.endings.Add(1)
		return syscall.ENOMEM
	}))
	require.ErrorIs(t, s.patiently(func() error { return syscall.ENOMEM }), syscall.ENOMEM, "no client has ended")
}

// TestEventsOfOthers: a user sees her own programs' events, with the names of the files that they map.
func TestEventsOfOthers(t *testing.T) {
	v := Viewer{User: 1001, mine: map[pagecache.FileID]bool{{Ino: 1}: true}}
	mine := live.Event{Process: 7, User: 1001, File: "a", ID: live.FileID{Ino: 1}, Lost: 3}
	require.True(t, v.shows(&mine))
	require.Equal(t, "a", mine.File)
	require.Zero(t, mine.Lost)
	unknown := live.Event{Process: 7, User: 1001, File: "b", ID: live.FileID{Ino: 2}}
	require.True(t, v.shows(&unknown))
	require.NotContains(t, unknown.File, "b")
	require.False(t, v.shows(&live.Event{Process: 7, User: 1002}))
	require.False(t, v.shows(&live.Event{User: 1001}), "of the daemon")
	v.All = true
	require.True(t, v.shows(&live.Event{User: 1002, File: "b"}))
}

// socketPair returns the two ends of a connection.
func socketPair(t *testing.T) (conns [2]*net.UnixConn) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	for i, fd := range ends {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = conns[i].Close() })
	}
	return conns
}

// TestClientThatIsGone: a client that has closed its connection is gone, even while its session has not noticed yet.
func TestClientThatIsGone(t *testing.T) {
	conns := socketPair(t)
	s := &session{ctx: t.Context(), conn: conns[0]}
	require.False(t, s.clientGone())
	require.NoError(t, conns[1].Close())
	require.True(t, s.clientGone())
}

// TestReadOnlyMappingsAreNotReleased: there is nothing to release, so the page cache is not asked.
func TestReadOnlyMappingsAreNotReleased(t *testing.T) {
	m := &openMap{length: 4096} // without a Mapping, whose methods would panic
	pages, err := new(session).serveRangeOf(m, typeRelease, rangeRequest{len: 4096})
	require.NoError(t, err)
	require.Zero(t, pages)
}

// TestAttachOfAnotherProcess: a process that knows the key of another one's session gets no service connection for it.
func TestAttachOfAnotherProcess(t *testing.T) {
	conns := socketPair(t)
	server := &Server{ctx: t.Context(), sessions: make(map[*session]struct{}), users: make(map[uint32]*user)}
	server.opts = Options{MaxSessions: 8, MaxRequests: 1, WriteTimeout: time.Minute, Log: slog.New(slog.DiscardHandler)}
	server.opts.privileged = func(uint32) bool { return true }
	newClient := func(pid int32) *session {
		s := newSession(server, conns[0], unix.Ucred{Pid: pid})
		s.version = 2
		require.Empty(t, server.admitLocked(s))
		return s
	}
	victim, other := newClient(1), newClient(2)
	victim.key, victim.serviceable = sessionKey{1}, true
	require.NoError(t, other.attach(1, victim.key))
	require.Nil(t, victim.service)
	b := make([]byte, 1024)
	n, err := conns[1].Read(b)
	require.NoError(t, err)
	require.Contains(t, string(b[:n]), "no connection of this process has that key")
}
