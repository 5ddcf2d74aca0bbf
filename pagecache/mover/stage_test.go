package mover

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
)

// TestStageForRelays: with relays, a Fill's memory is staged for more readers and more links.
func TestStageForRelays(t *testing.T) {
	f := newFiller(t, 4<<20)
	staged := func(relays int) (n int) {
		f.dev.BufferSizes()
		require.NoError(t, f.moves.Stage(t.Context(), 1, relays))
		for size, count := range f.dev.BufferSizes() {
			n += size * count
		}
		return n
	}
	own := goroutinesOf(1)
	require.Equal(t, own*PieceBytes+senders*callBytes, staged(0))
	require.Equal(t, (max(own, min(3*own, readingCores()))+2)*PieceBytes+(senders+2)*callBytes, staged(2))
}

func TestStage(t *testing.T) {
	f := newFiller(t, 4<<20)
	require.NoError(t, f.moves.Stage(t.Context(), 2, 0))
	broken := errors.New("no host memory")
	f.dev.Fail(faulty.HostBuffer, 2, broken)
	require.ErrorIs(t, f.moves.Stage(t.Context(), 2, 0), broken)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.ErrorIs(t, f.moves.Stage(ctx, 2, 0), context.Canceled)
}
