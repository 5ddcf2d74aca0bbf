package mover

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
)

func TestStage(t *testing.T) {
	f := newFiller(t, 4<<20)
	require.NoError(t, f.moves.Stage(t.Context(), 2))
	broken := errors.New("no host memory")
	f.dev.Fail(faulty.HostBuffer, 2, broken)
	require.ErrorIs(t, f.moves.Stage(t.Context(), 2), broken)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.ErrorIs(t, f.moves.Stage(ctx, 2), context.Canceled)
}
