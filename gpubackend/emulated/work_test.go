package emulated

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInPieces(t *testing.T) {
	for _, n := range []int{0, 1, 2, 7, 1000} {
		done := make([]atomic.Int32, n)
		require.NoError(t, inPieces(t.Context(), n, func(i int) { done[i].Add(1) }))
		for i := range done {
			require.Equal(t, int32(1), done[i].Load(), "piece %d of %d", i, n)
		}
	}
}

// TestInPiecesUsesProcessors: two pieces wait for each other, which needs two goroutines.
func TestInPiecesUsesProcessors(t *testing.T) {
	setProcessors(t, 2)
	var both sync.WaitGroup
	both.Add(2)
	require.NoError(t, inPieces(t.Context(), 2, func(int) {
		both.Done()
		both.Wait()
	}))
}

// TestInPiecesStops ends the context in a piece: no piece is begun after it.
func TestInPiecesStops(t *testing.T) {
	for _, processors := range []int{1, 4} {
		setProcessors(t, processors)
		ctx, cancel := context.WithCancel(t.Context())
		var done atomic.Int32
		err := inPieces(ctx, 1000, func(i int) {
			done.Add(1)
			if i == 5 {
				cancel()
			}
			if i > 5 { // begun beside piece 5: let it end the context first
				<-ctx.Done()
			}
		})
		require.ErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, int(done.Load()), 5+processors)
	}
}

func TestBundle(t *testing.T) {
	parts := cut(nil, part{mem: make([]byte, 2*pieceSize+1), host: make([]byte, 2*pieceSize+1)})
	require.Len(t, parts, 3)
	for range 4 {
		parts = cut(parts, part{mem: make([]byte, pieceSize/3), host: make([]byte, pieceSize/3)})
	}
	parts = cut(parts, part{})
	require.Equal(t, []int{1, 2, 6,
		7}, bundle(parts), "pieces of at most pieceSize, and no more of them than that takes")
	require.Empty(t, bundle(nil))
}

// setProcessors sets GOMAXPROCS for one test.
func setProcessors(t *testing.T, n int) {
	was := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(was) })
}
