package cleanread

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChunkMemory(t *testing.T) {
	var m chunkMemory
	var taken []*chunkBytes
	for range spareChunks + slabChunks {
		b := m.take()
		require.NotNil(t, b)
		b[0], b[ChunkSize-1] = 1, 1
		taken = append(taken, b)
	}
	one := taken[0]
	for _, b := range taken[1:] {
		m.give(b)
	}
	require.Len(t, m.spares, spareChunks)
	for _, b := range m.bare {
		require.Zero(t, b[0], "it has no memory")
	}
	m.free()
	require.EqualValues(t, 1, one[0], "it is in use")
	m.give(one)
	m.free()
	require.Empty(t, m.slabs)
	require.NotNil(t, m.take())
	m.free()
}
