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
