package control_test

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// recorder starts a server that records the accesses to a page cache without devices.
func recorder(t *testing.T) (*server, *pagecache.Cache) {
	c, err := pagecache.New(pagecache.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(t.Context())) })
	return start(t, &controltest.Cache{}, func(o *control.Options) { o.Record = c.Record }), c
}

func (s *server) statusToken() [16]byte {
	s.t.Helper()
	g, err := s.GrantStatus(0)
	require.NoError(s.t, err)
	return g.Token
}

// begins sends a RECORD, and returns the first bytes of the recording.
func (c *client) begins(s *server, id uint64) []byte {
	c.t.Helper()
	c.send(frame(record, id, s.statusToken()))
	r := c.read()
	require.Equal(c.t, reply{typ: document, flags: 1, id: id, body: r.body}, r)
	return r.body
}

func TestARecordingIsSentUntilItIsStopped(t *testing.T) {
	s, cache := recorder(t)
	c := s.connect()
	all := c.begins(s, 5)
	for i := range int64(100_000) {
		cache.Recording().Access(pagecache.Access{
			Describe: func() (string, int64) { return "a", 1 << 20 },
			Device:   pagecache.OnCPU, Off: i % 4096, Len: 1, Size: -1, Began: time.Now(),
		})
	}
	require.Equal(t, syscall.EBUSY, s.connect().call(frame(record, 1, s.statusToken())).errno(), "only one recording at a time")
	c.send(frame(stop, 6, uint64(5)))
	var stopped, ended bool
	for !stopped || !ended {
		r := c.read()
		if r.typ == result {
			require.Zero(t, r.errno())
			require.EqualValues(t, 6, r.id)
			stopped = true
			continue
		}
		require.EqualValues(t, document, r.typ)
		require.EqualValues(t, 5, r.id)
		all = append(all, r.body...)
		ended = r.flags == 0
	}
	got, err := trace.Read(bytes.NewReader(all))
	require.NoError(t, err)
	require.EqualValues(t, 100_000, uint64(got.Accesses())+got.Lost)
	require.Nil(t, cache.Recording())
	require.Equal(t, syscall.EINVAL, c.call(frame(stop, 7, uint64(5))).errno(), "the recording has ended")
	require.NotEmpty(t, c.begins(s, 5), "and another may begin")
}

func TestARecordingEndsWithItsClient(t *testing.T) {
	s, cache := recorder(t)
	c := s.connect()
	c.begins(s, 1)
	require.NotNil(t, cache.Recording())
	c.close()
	s.waitSessions(0)
	require.Nil(t, cache.Recording())
}

func TestWhatRecordIsRefusedFor(t *testing.T) {
	s, _ := recorder(t)
	c := s.connect()
	require.Equal(t, syscall.EACCES, c.call(frame(record, 1, s.token())).errno(), "the token is for a file")
	require.Equal(t, syscall.EACCES, c.call(frame(record, 1, [16]byte{1})).errno())
	require.Equal(t, syscall.EINVAL, c.call(frame(stop, 1, uint64(9))).errno())
	without := start(t, &controltest.Cache{})
	require.Equal(t, syscall.ENOTSUP, without.connect().call(frame(record, 1, without.statusToken())).errno())
}
