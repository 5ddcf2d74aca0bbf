package parts

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMergesKeepBothVersions(t *testing.T) {
	m := NewMerge(0.25)
	m.Run(1)
	for i := range m.out {
		switch {
		case m.mine[i] != m.base[i]:
			require.Equal(t, m.mine[i], m.out[i])
		default:
			require.Equal(t, m.theirs[i], m.out[i])
		}
	}
}

func TestBothSearchesFindTheModifiedPages(t *testing.T) {
	s, err := NewSearch(context.Background(), 8<<20)
	require.NoError(t, err)
	require.EqualValues(t, 21, s.modified)
	_, err = s.Device(context.Background())
	require.NoError(t, err)
	_, err = s.Compare()
	require.NoError(t, err)
	s.modified++
	_, err = s.Compare()
	require.Error(t, err)
	require.NoError(t, s.Close())
}

func TestDisagreeingPagesTakeMore(t *testing.T) {
	same, different := Agreeing(256, 8), Disagreeing(256, 8) // with invariants, the time is quadratic
	require.Positive(t, same.Accounted)
	require.Greater(t, different.Accounted, 5*same.Accounted)
}
