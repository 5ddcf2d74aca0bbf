package control_test

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
)

// TestGivenBackAtTheLastMoment: a client asks for memory of a client that is gone, and whose mappings take a while to
// end.
func TestGivenBackAtTheLastMoment(t *testing.T) {
	open, refused := make(chan struct{}), make(chan struct{}, 100)
	cache := &controltest.Cache{Gate: func(context.Context) error { <-open; return nil }}
	cache.MapGate = func(context.Context) error {
		if live, _ := cache.Mapped(); live > 0 {
			refused <- struct{}{}
			return syscall.ENOMEM
		}
		return nil
	}
	s := start(t, cache)
	dead, next := s.connect(), s.connect()
	mapping := dead.mapOne(s)

	next.send(mapFrame(1, s.token(), 3, 0, 4096))
	require.Equal(t, syscall.ENOMEM, next.read().errno(), "the other client lives")
	<-refused

	dead.send(rangeFrame(acquire, 2, mapping, 0, 4096, 0))
	dead.close()
	next.send(mapFrame(2, s.token(), 3, 0, 4096))
	<-refused
	close(open)
	require.Equal(t, uint16(mapped), next.read().typ)
}

// TestBytesOfAViewAtTheLastMoment: the memory that is missing to fill a view is a gone client's.
func TestBytesOfAViewAtTheLastMoment(t *testing.T) {
	open, refused := make(chan struct{}), make(chan struct{}, 100)
	cache := &controltest.Cache{Devices: 1, UnmapGate: func() { <-open }}
	cache.Gate = func(context.Context) error {
		if live, _ := cache.Mapped(); live > 1 {
			refused <- struct{}{}
			return syscall.ENOMEM
		}
		return nil
	}
	s := start(t, cache)
	dead, next := s.connect(), s.connectViews()
	dead.mapOne(s)
	ask := func() (mapping uint64) {
		one := [][5]uint64{{0, 1, 0, 1, 0}}
		next.send(viewRequest{alignment: 1, tokens: [][16]byte{s.token()}, segments: one}.frame(2))
		m := next.read()
		require.Equal(t, uint16(mapped), m.typ)
		require.Equal(t, uint16(extents), next.read().typ)
		<-refused
		return m.mapping()
	}

	view := ask()
	require.Equal(t, syscall.ENOMEM, next.read().errno(), "the other client lives")
	require.Zero(t, next.call(frame(unmap, 3, view)).errno())

	dead.close()
	ask()
	close(open)
	last := next.read()
	require.Equal(t, uint16(extents), last.typ)
	require.Zero(t, last.fds)
}
