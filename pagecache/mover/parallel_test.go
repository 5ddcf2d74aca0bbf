package mover

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestInParallel makes calls that end in any order; some fail.
func TestInParallel(t *testing.T) {
	for _, goroutines := range []int{1, 2, 16} {
		for _, n := range []int{0, 1, 2, 1000} {
			called := make([]atomic.Int32, n)
			require.NoError(t, InParallel(n, goroutines, func(i int) error {
				called[i].Add(1)
				return nil
			}))
			for i := range called {
				require.EqualValues(t, 1, called[i].Load(), "%d of %d", i, n)
			}
		}
		failure := errors.New("no")
		var running, begun atomic.Int32
		err := InParallel(1000, goroutines, func(i int) error {
			running.Add(1)
			defer running.Add(-1)
			if begun.Add(1); i >= 20 {
				return failure
			}
			return nil
		})
		require.ErrorIs(t, err, failure)
		require.Zero(t, running.Load(), "a call outlived InParallel")
		require.LessOrEqual(t, begun.Load(), int32(20+goroutines))
		require.GreaterOrEqual(t, begun.Load(), int32(21))
	}
}
