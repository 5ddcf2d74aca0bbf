package mapped_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/mapped"
)

// TestTry reads memory of a file that becomes shorter.
func TestTry(t *testing.T) {
	const size = 64 << 10
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(size))
	m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(m)) }()
	to := make([]byte, size)
	read := func() { copy(to, m) }
	require.True(t, mapped.Try(read))
	require.NoError(t, f.Truncate(size/2))
	require.False(t, mapped.Try(read))
	require.True(t, mapped.Try(func() { copy(to, m[:size/2]) }))
	require.PanicsWithValue(t, "mine", func() { mapped.Try(func() { panic("mine") }) })
}
