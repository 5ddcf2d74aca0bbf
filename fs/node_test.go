package fs

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestDroppedNodeKeepsDescriptorInUse: read-ahead uses the descriptor of a directory that the kernel forgets.
func TestDroppedNodeKeepsDescriptorInUse(t *testing.T) {
	s := mount(t)
	require.NoError(t, os.Mkdir(filepath.Join(s.source, "d"), 0o755))
	_, err := os.Stat(filepath.Join(s.mnt, "d")) // makes the kernel look it up
	require.NoError(t, err)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, "d"), &st))
	n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	fd, errno := s.fs.hold(n)
	require.Zero(t, errno)
	s.fs.Forget(uint64(n.id), math.MaxUint64)
	var held unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &held))
	assert.Equal(t, st.Ino, held.Ino)
	open := s.fs.descriptors.count()
	s.fs.unhold(n)
	assert.Equal(t, open-1, s.fs.descriptors.count())
	assert.Equal(t, -1, n.fd)
	_, errno = s.fs.hold(n)
	assert.Equal(t, unix.ESTALE, errno)
}
