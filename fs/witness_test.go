package fs

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
