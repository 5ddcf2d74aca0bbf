package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache"
)

func TestDefaultHostMemory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "memory.max")
	machine := defaultHostMemory(file)
	require.GreaterOrEqual(t, machine, size(pagecache.DefaultHostMemory))
	for limit, want := range map[string]size{
		"max\n": machine, "nonsense": machine, "4398046511104\n": machine,
		"8589934592\n": min(machine, 512<<20), "1048576\n": pagecache.DefaultHostMemory,
	} {
		require.NoError(t, os.WriteFile(file, []byte(limit), 0o600))
		require.Equal(t, want, defaultHostMemory(file), limit)
	}
}
