package control_test

import (
	"bytes"
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
)

func endFrame(id uint64, token [16]byte, flags uint32) []byte {
	return frame(end, id, token, flags, uint32(0))
}

// The answer to an END comes in parts, and END notices when the client goes.
func TestEndIsAnsweredInParts(t *testing.T) {
	went := make(chan error, 1)
	large := bytes.Repeat([]byte("x"), 100<<10)
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.End = func(ctx context.Context, r control.EndRequest) error {
			if r.Force {
				require.NoError(t, r.Say(large, false))
				return r.Say([]byte("last"), true)
			}
			require.NoError(t, r.Say([]byte("first"), false))
			<-ctx.Done()
			went <- ctx.Err()
			return ctx.Err()
		}
	})
	c := s.connect()
	c.send(endFrame(1, s.statusToken(), 1))
	var got []byte
	for more := true; more; {
		r := c.read()
		require.Equal(t, uint16(document), r.typ)
		got, more = append(got, r.body...), r.flags&1 != 0
	}
	require.Equal(t, string(large)+"last", string(got))
	c.send(endFrame(1, s.statusToken(), 0)) // the id is free again
	require.Equal(t, "first", string(c.read().body))
	c.close()
	require.Error(t, <-went)
}

func TestWhatEndIsRefusedFor(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.End = func(context.Context, control.EndRequest) error { return syscall.ESHUTDOWN }
	})
	c := s.connect()
	require.Equal(t, syscall.EACCES, c.call(endFrame(1, s.token(), 0)).errno(), "the token is for a file")
	require.Equal(t, syscall.EACCES, c.call(endFrame(1, [16]byte{1}, 0)).errno())
	require.Equal(t, syscall.EINVAL, c.call(endFrame(1, s.statusToken(), 2)).errno())
	require.Equal(t, syscall.ESHUTDOWN, c.call(endFrame(1, s.statusToken(), 0)).errno())
	without := start(t, &controltest.Cache{})
	require.Equal(t, syscall.ENOTSUP, without.connect().call(endFrame(1, without.statusToken(), 0)).errno())
}

// Drain ends all sessions at once: a release that hangs holds up no other one.
func TestDrainWaitsForAllSessionsTogether(t *testing.T) {
	began, end := make(chan struct{}, 2), make(chan struct{})
	s := start(t, &controltest.Cache{UnmapGate: func() {
		began <- struct{}{}
		<-end
	}})
	for range 2 {
		c := s.connect()
		c.send(mapFrame(1, s.token(), 3, 0, 4096))
		require.Equal(t, uint16(mapped), c.read().typ)
	}
	drained := make(chan error, 1)
	go func() { drained <- s.Drain(context.Background()) }()
	for range 2 {
		select {
		case <-began:
		case <-time.After(30 * time.Second):
			assert.Fail(t, "a session waits for another one to end")
		}
	}
	require.Empty(t, drained)
	close(end)
	require.NoError(t, <-drained)
}

// Drain releases what clients map. Sessions that only ask for the status go on.
func TestDrainEndsMappings(t *testing.T) {
	s := start(t, &controltest.Cache{})
	maps, asks := s.connect(), s.connect()
	maps.send(mapFrame(1, s.token(), 3, 0, 4096))
	require.Equal(t, uint16(mapped), maps.read().typ)
	s.waitMapped(1)
	require.NoError(t, s.Drain(context.Background()))
	live, _ := s.cache.Mapped()
	require.Zero(t, live)
	asks.send(frame(status, 1, s.statusToken()))
	require.Equal(t, uint16(document), asks.read().typ)
	require.Equal(t, syscall.ESHUTDOWN, asks.call(mapFrame(1, s.token(), 3, 0, 4096)).errno())
	late := s.connect()
	late.send(frame(status, 1, s.statusToken()))
	require.Equal(t, uint16(document), late.read().typ)
}
