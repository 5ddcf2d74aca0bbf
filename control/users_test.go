package control_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// ordinary makes the tests' user an ordinary one, until the returned function is called.
func ordinary(o *control.Options) (privilege func()) {
	var is atomic.Bool
	o.SetPrivileged(func(uint32) bool { return is.Load() })
	return func() { is.Store(true) }
}

// refusal reads the last frame of a connection that gets no session.
func (c *client) refusal() string {
	c.t.Helper()
	last := c.ended()
	require.Equal(c.t, uint16(failure), last.typ)
	require.Equal(c.t, syscall.EUSERS, last.errno())
	return last.text()
}

// TestTooManySessions: a user fills her share, and the privileged theirs. The status can still be read.
func TestTooManySessions(t *testing.T) {
	var privilege func()
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.MaxSessions = 8
		privilege = ordinary(o)
	})
	first := s.connect()
	s.connect()
	require.Contains(t, s.dial().refusal(), "too many clients of this user are connected")
	require.Zero(t, first.call(frame(ping, 1)).errno())
	first.close()
	s.waitSessions(1)
	s.connect()

	privilege()
	for range 6 {
		s.connect().mapOne(s)
	}
	for range control.StatusReserve {
		c := s.connect()
		r := c.call(mapFrame(1, s.token(), 3, 0, 4096))
		require.Equal(t, syscall.EUSERS, r.errno())
		require.Contains(t, r.text(), "can only be used for the status")
		g, err := s.GrantStatus(0)
		require.NoError(t, err)
		c.send(frame(status, 2, g.Token))
		require.Equal(t, uint16(document), c.read().typ)
	}
	require.Contains(t, s.dial().refusal(), "too many clients are connected")
}

// TestOrdinaryUsersLeaveSomeSessions: all ordinary users together do not get every connection.
func TestOrdinaryUsersLeaveSomeSessions(t *testing.T) {
	var privilege func()
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.MaxSessions = 1 // the share of one user is at least one connection
		privilege = ordinary(o)
	})
	s.connect()
	require.Contains(t, s.dial().refusal(), "too many clients")
	privilege()
	s.connect()
}

func TestTooManyMappingsOfAUser(t *testing.T) {
	var privilege func()
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.MaxMappings = 2
		privilege = ordinary(o)
	})
	a, b := s.connect(), s.connect()
	one := a.mapOne(s)
	b.mapOne(s)
	r := b.call(mapFrame(2, s.token(), 3, 0, 4096))
	require.Equal(t, syscall.ENOMEM, r.errno())
	require.Contains(t, r.text(), "the processes of this user already have 2 mappings and open brackets")
	require.Zero(t, a.call(frame(unmap, 3, one)).errno())
	b.mapOne(s)
	b.close()
	s.waitMapped(0)
	a.mapOne(s)
	privilege()
	c := s.connect()
	c.mapOne(s)
	c.mapOne(s)
}

// TestStatusIsForSomebody: the status learns who asks, and which files that user maps.
func TestStatusIsForSomebody(t *testing.T) {
	var privilege func()
	var file pagecache.FileID
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		privilege = ordinary(o)
		o.Status = func(v control.Viewer) any {
			return map[string]bool{"all": v.All, "mine": v.Knows(file), "other": v.Knows(pagecache.FileID{Ino: 1})}
		}
	})
	file = s.file.ID()
	ask := func() (answer map[string]bool) {
		g, err := s.GrantStatus(0)
		require.NoError(t, err)
		c := s.connect()
		defer c.close()
		c.send(frame(status, 2, g.Token))
		require.NoError(t, json.Unmarshal(c.read().body, &answer))
		return answer
	}
	require.Equal(t, map[string]bool{"all": false, "mine": false, "other": false}, ask())
	c := s.connect()
	c.mapOne(s)
	require.Equal(t, map[string]bool{"all": false, "mine": true, "other": false}, ask(),
		"of another process of the user")
	c.close()
	s.waitMapped(0)
	require.Equal(t, map[string]bool{"all": false, "mine": false, "other": false}, ask())
	privilege()
	require.Equal(t, map[string]bool{"all": true, "mine": true, "other": true}, ask())
}

// TestRecordingIsForThePrivileged, because a recording has the names of everybody's files.
func TestRecordingIsForThePrivileged(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { ordinary(o) })
	g, err := s.GrantStatus(0)
	require.NoError(t, err)
	require.Equal(t, syscall.EPERM, s.connect().call(frame(record, 2, g.Token)).errno())
}

// TestRequestsForThePrivileged: others may not end the mount, change its settings, evict files, profile the daemon or
// watch paths, and need a token of the mount to ask for its status.
func TestRequestsForThePrivileged(t *testing.T) {
	served := 0
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		ordinary(o)
		o.Live = new(live.Feed)
		o.End = func(context.Context, control.EndRequest) error { served++; return nil }
		o.File = func(context.Context, control.FileRequest) (any, error) { served++; return nil, nil }
		o.Set = func(context.Context, control.SetRequest) ([]byte, error) { served++; return nil, nil }
		o.Profile = func(context.Context, control.ProfileKind, time.Duration) ([]byte, error) {
			served++
			return nil, nil
		}
	})
	const fileRequest, profile, watch, set, evict = 32, 33, 34, 35, uint32(4)
	c := s.connect()
	for name, x := range map[string]struct {
		request []byte
		want    syscall.Errno
	}{
		"end":     {endFrame(1, s.statusToken(), 0), syscall.EPERM},
		"evict":   {frame(fileRequest, 1, s.token(), evict, uint32(0), int64(0), int64(0)), syscall.EPERM},
		"profile": {frame(profile, 1, s.statusToken(), uint32(1), uint32(0)), syscall.EPERM},
		"watch":   {frame(watch, 1, s.statusToken(), []byte(`{"path":"secret"}`)), syscall.EPERM},
		"set":     {frame(set, 1, s.statusToken(), uint32(3), uint32(0), []byte("a=b")), syscall.EPERM},
		"status":  {frame(status, 1, [16]byte{}), syscall.EACCES},
	} {
		require.Equal(t, x.want, c.call(x.request).errno(), name)
	}
	require.Zero(t, served)
}

// TestRequestsOfAUserAreBounded: a user's connections share a limit of running requests. A user above it waits; nobody
// else does.
func TestRequestsOfAUserAreBounded(t *testing.T) {
	const most = 32 // for MaxRequests 1
	entered, open := make(chan struct{}, 2*most), make(chan struct{})
	s := start(t, &controltest.Cache{Gate: func(ctx context.Context) error {
		entered <- struct{}{}
		<-open
		return nil
	}}, func(o *control.Options) {
		o.MaxRequests = 1
		ordinary(o)
	})
	var clients []*client
	var mappings []uint64
	for range most + 1 {
		c := s.connect()
		clients, mappings = append(clients, c), append(mappings, c.mapOne(s))
	}
	for i, c := range clients {
		c.send(rangeFrame(acquire, 2, mappings[i], 0, 1, 0))
		if i < most {
			<-entered
		}
	}
	other := s.connect()
	other.send(frame(ping, 1)) // waits, like all of her requests
	require.Empty(t, entered)
	close(open)
	require.Zero(t, other.read().errno())
	for _, c := range clients {
		require.Zero(t, c.read().errno())
	}
}
