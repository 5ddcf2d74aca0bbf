package fs

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestSignatureOfChangesBesideEachOther ends changes in turns and at once: what the last one left is known, and somebody else's
// change after it is seen.
func TestSignatureOfChangesBesideEachOther(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	fd := int(f.Fd())
	var s signature
	differs := func() bool {
		t.Helper()
		var st unix.Statx_t
		mark := s.snapshot()
		require.NoError(t, statx(fd, "", &st))
		return s.differs(mark, &st)
	}
	change := func() {
		_, err := f.Write([]byte("x"))
		assert.NoError(t, err)
	}

	s.begin()
	s.begin()
	change()
	s.endWith(fd)
	assert.True(t, s.changing())
	change()
	assert.False(t, differs(), "a change is under way")
	s.endWith(fd)
	assert.False(t, s.changing())
	assert.True(t, s.known)
	assert.False(t, differs())

	for range 100 {
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				s.begin()
				defer s.endWith(fd)
				change()
			})
		}
		group.Wait()
		require.True(t, s.known)
		require.False(t, differs())
	}
	require.NoError(t, f.Truncate(3))
	assert.True(t, differs())

	s.begin()
	s.endWith(-1)
	assert.False(t, s.known, "it could not be asked for")
	assert.False(t, differs())
}
