package fs

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// TestWitnessOfOverlappingChanges ends changes one after the other and at once. The attributes that the last one left
// are known, and foreign changes before and after are noticed.
func TestWitnessOfOverlappingChanges(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	fd := int(f.Fd())
	var w witness
	look := func() uint64 {
		t.Helper()
		n, err := w.look(fd)
		require.NoError(t, err)
		return n
	}
	change := func() {
		_, err := f.Write([]byte("x"))
		assert.NoError(t, err)
	}
	require.Zero(t, look())

	w.begin(fd)
	w.begin(fd)
	change()
	w.end(fd, anySize)
	change()
	assert.Zero(t, look(), "a change is under way")
	w.end(fd, anySize)
	assert.Zero(t, look())

	for range 100 {
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				w.begin(fd)
				defer w.end(fd, anySize)
				change()
			})
		}
		group.Wait()
		require.Zero(t, look())
	}
	change()
	assert.EqualValues(t, 1, look())
	assert.EqualValues(t, 1, look())
	change()
	w.begin(fd)
	change()
	w.end(fd, anySize)
	assert.EqualValues(t, 2, look(), "the mount's own change hid another")

	w.begin(fd)
	w.end(-1, anySize)
	assert.False(t, w.known, "the attributes could not be read")
	assert.EqualValues(t, 2, look())
}

// TestTimeSetDuringAWriteStays: a program sets mtime while the kernel's dirty pages are on their way. The write that
// ends later leaves that time.
func TestTimeSetDuringAWriteStays(t *testing.T) {
	s := mount(t, writeBack)
	path := filepath.Join(s.mnt, "f")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, "f"), &st))
	n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	fd := n.content().opened.Load().fd
	before, set := time.Unix(1e9, 0), time.Unix(11e8, 5)
	require.NoError(t, os.Chtimes(path, before, before))
	write := pagecache.Change{Kind: pagecache.ChangeWrite, Len: 1, WriteBack: true}
	for _, meanwhile := range []bool{false, true} {
		n.content().witness.begin(fd)
		require.NoError(t, n.content().changeHome(t.Context(), s.fs, fd, write, func(int64, int64) error {
			if meanwhile {
				require.NoError(t, os.Chtimes(path, set, set))
			}
			_, err := unix.Pwrite(fd, []byte("x"), 0)
			return err
		}))
		n.content().witness.end(fd, 1)
		st, err := os.Stat(filepath.Join(s.source, "f"))
		require.NoError(t, err)
		require.Equal(t, meanwhile, st.ModTime().Equal(set), "%v", st.ModTime())
		require.Equal(t, meanwhile, !st.ModTime().Equal(before), "%v", st.ModTime())
	}
}
