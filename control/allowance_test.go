package control_test

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// body returns a sealed memfd of n bytes that begins with the parts.
func body(t *testing.T, n int, parts ...any) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("body", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "body")
	t.Cleanup(func() { f.Close() })
	_, err = f.Write(frame(acquireAll, 0, parts...)[16:])
	require.NoError(t, err)
	require.NoError(t, f.Truncate(int64(n)))
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sealed)
	require.NoError(t, err)
	return f
}

// TestLargeRequestsOfAUserAreBounded: what the running requests of an ordinary user keep is counted before it is kept.
// A request beyond the limit waits, and then fails instead of waiting for what may be behind it. Small requests go on,
// and nothing stays counted, even if a client ends.
func TestLargeRequestsOfAUserAreBounded(t *testing.T) {
	const parts = 4
	entered, open := make(chan struct{}, 2*parts), make(chan struct{})
	s := start(t, &controltest.Cache{Devices: 1, Gate: func(ctx context.Context) error {
		entered <- struct{}{}
		select {
		case <-open:
		case <-ctx.Done():
		}
		return nil
	}}, func(o *control.Options) { ordinary(o) })
	large := body(t, control.MostKept/parts, uint64(0), uint32(0), uint32(0),
		uint32(1), uint32(24), uint64(1), uint64(0), uint64(4096))
	var clients []*client
	for range parts + 1 {
		c := s.connectGroups()
		c.mapOne2(s)
		clients = append(clients, c)
	}
	for _, c := range clients[:parts] {
		c.sendLarge(acquireAll, 2, control.MostKept/parts, large)
		<-entered
	}
	require.EqualValues(t, control.MostKept, s.Kept())
	late := clients[parts]
	late.sendLarge(acquireAll, 2, control.MostKept/parts, large)
	r := late.read()
	require.Equal(t, syscall.EAGAIN, r.errno())
	require.Contains(t, r.text(), "the running requests of one user may keep 32 MiB")
	require.Zero(t, late.call(frame(ping, 3)).errno())
	require.Empty(t, entered)

	clients[0].close() // its request ends with it
	require.Eventually(t, func() bool { return s.Kept() == control.MostKept*(parts-1)/parts }, time.Minute,
		time.Millisecond)
	late.sendLarge(acquireAll, 4, control.MostKept/parts, large)
	<-entered
	close(open)
	for _, c := range clients[1:] {
		require.Equal(t, uint16(numbered), c.read().typ)
	}
	require.Zero(t, s.Kept())
}

// TestWatchesOfAUserAreBounded: events wait in each watch, so a user has few.
func TestWatchesOfAUserAreBounded(t *testing.T) {
	var feed live.Feed
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		ordinary(o)
		o.Live = &feed
	})
	watch := func() (*client, reply) {
		c := s.connect()
		grant, err := s.GrantStatus(uint32(os.Geteuid()))
		require.NoError(t, err)
		c.send(frame(34, 2, grant.Token, []byte("{}")))
		return c, c.read()
	}
	var first *client
	for i := range control.MostWatches {
		c, r := watch()
		require.Equal(t, uint16(document), r.typ)
		if i == 0 {
			first = c
		}
	}
	_, r := watch()
	require.Equal(t, syscall.EAGAIN, r.errno())
	first.close()
	require.Eventually(t, func() bool {
		_, r := watch()
		return r.typ == document
	}, time.Minute, time.Millisecond)
}
