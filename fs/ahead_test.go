package fs

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// smallFiles makes n files in a directory of SOURCE, and makes the host drop their bytes. It skips the test if the host
// cannot say what it has cached.
func (s *scene) smallFiles(t *testing.T, dir string, n int, name func(i int) string) {
	t.Helper()
	require.NoError(t, os.Mkdir(filepath.Join(s.source, dir), 0o755))
	for i := range n {
		path := filepath.Join(s.source, dir, name(i))
		require.NoError(t, os.WriteFile(path, make([]byte, 20<<10), 0o644))
		s.forget(t, path)
	}
	if s.cachedFiles(t, dir) > 0 {
		t.Skip("the tests' filesystem keeps the bytes of files, or cannot say what it has cached")
	}
}

// forget makes the host drop its pages of a file.
func (s *scene) forget(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Sync())
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// cachedFiles returns how many files of a directory of SOURCE the host has cached.
func (s *scene) cachedFiles(t *testing.T, dir string) (n int) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.source, dir))
	require.NoError(t, err)
	for _, e := range entries {
		f, err := os.Open(filepath.Join(s.source, dir, e.Name()))
		require.NoError(t, err)
		if found, err := pagesCached(int(f.Fd()), 0, 1<<20); err != nil || found > 0 {
			n++
		}
		f.Close()
	}
	return n
}

func (s *scene) readSmall(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(s.mnt, dir, name))
		require.NoError(t, err)
		require.NotEmpty(t, b)
		s.settleAhead()
	}
}

// settleAhead waits for read-ahead that programs' reads have started. The kernel orders those reads before this call
// and later reads after it; taking the lock shows that to the race detector.
func (s *scene) settleAhead() {
	locked := func() int {
		s.fs.ahead.mu.Lock()
		defer s.fs.ahead.mu.Unlock()
		return len(s.fs.ahead.dirs)
	}
	locked()
	s.fs.ahead.running.Wait()
	locked()
}

func numbered(i int) string { return fmt.Sprintf("f%d", i) }
func padded(i int) string   { return fmt.Sprintf("%04d.jpg", i) }

func TestReadsAheadAcrossFiles(t *testing.T) {
	for mode, change := range map[string]func(*Options){
		"writable": func(*Options) {},
		"kernel opens": func(o *Options) {
			kernelOpens(o)
		},
	} {
		for _, order := range []struct {
			name string
			of   func(int) string
			sort func([]string)
		}{
			{"numbers", numbered, func([]string) {}},
			{"names", numbered, slices.Sort[[]string]},
			{"padded", padded, func([]string) {}},
		} {
			t.Run(mode+" "+order.name, func(t *testing.T) {
				s := mount(t, change)
				const files = 200
				s.smallFiles(t, "d", files, order.of)
				var names []string
				for i := range files {
					names = append(names, order.of(i))
				}
				order.sort(names)
				s.readSmall(t, "d", names[:aheadTold]...)
				assert.EqualValues(t, aheadFirst, s.fs.ahead.fetched.Load())
				s.readSmall(t, "d", names[aheadTold:]...)
				assert.EqualValues(t, files-aheadTold, s.fs.ahead.fetched.Load(), "each file once, but the first ones")

				// The next directory is read ahead from its first file on.
				s.smallFiles(t, "e", files, order.of)
				s.readSmall(t, "e", names[0])
				assert.EqualValues(t, files-aheadTold+aheadFirst, s.fs.ahead.fetched.Load())
			})
		}
	}
}

// TestReadsAheadForSeveralReaders: readers that take turns, and overtake read-ahead, get every file.
func TestReadsAheadForSeveralReaders(t *testing.T) {
	s := mount(t, kernelOpens)
	const readers, dirs, files = 4, 20, 60
	for i := range dirs {
		s.smallFiles(t, fmt.Sprint("d", i), files, numbered)
	}
	var all sync.WaitGroup
	for r := range readers {
		all.Go(func() {
			for i := r; i < dirs*files; i += readers {
				b, err := os.ReadFile(filepath.Join(s.mnt, fmt.Sprint("d", i/files), numbered(i%files)))
				assert.NoError(t, err)
				assert.Len(t, b, 20<<10)
			}
		})
	}
	all.Wait()
	s.settleAhead()
	assert.LessOrEqual(t, s.fs.ahead.fetched.Load(), int64(dirs*files))
	for i := range dirs {
		assert.Equal(t, files, s.cachedFiles(t, fmt.Sprint("d", i)))
	}
}

func TestReadsNothingAheadWithoutOrder(t *testing.T) {
	s := mount(t)
	const files = 1000
	s.smallFiles(t, "d", files, numbered)
	names := make([]string, 60)
	for i, at := range rand.New(rand.NewPCG(1, 2)).Perm(files)[:len(names)] {
		names[i] = numbered(at)
	}
	s.readSmall(t, "d", names...)
	assert.LessOrEqual(t, s.cachedFiles(t, "d"), len(names)+aheadFirst)
	assert.LessOrEqual(t, s.fs.ahead.fetched.Load(), int64(aheadFirst))
}

func TestReadsNothingAheadThatTheHostHas(t *testing.T) {
	s := mount(t)
	s.smallFiles(t, "d", 100, numbered)
	for i := range 100 {
		_, err := os.ReadFile(filepath.Join(s.source, "d", numbered(i)))
		require.NoError(t, err)
	}
	for i := range 100 {
		s.readSmall(t, "d", numbered(i))
	}
	assert.Zero(t, s.fs.ahead.fetched.Load())
}

// TestReadsAheadSmallFilesOnly: anything but small files is left alone, and names that disappear do no harm.
func TestReadsAheadSmallFilesOnly(t *testing.T) {
	s := mount(t)
	in := func(name string) string { return filepath.Join(s.source, "d", name) }
	s.smallFiles(t, "d", 20, numbered)
	require.NoError(t, os.Remove(in("f5")))
	require.NoError(t, os.Mkdir(in("f5"), 0o755))
	require.NoError(t, os.Remove(in("f6")))
	require.NoError(t, unix.Mkfifo(in("f6"), 0o644))
	require.NoError(t, os.Remove(in("f7")))
	require.NoError(t, os.Symlink("f8", in("f7")))
	require.NoError(t, os.WriteFile(in("f9"), make([]byte, aheadLargest+1), 0o644))
	s.forget(t, in("f9"))
	require.NoError(t, os.WriteFile(in("f10"), nil, 0o644))
	s.readSmall(t, "d", "f0", "f1", "f2")
	assert.EqualValues(t, 20-3-5, s.fs.ahead.fetched.Load())
	require.NoError(t, os.RemoveAll(in("")))
	for i := range 2 * aheadDirs {
		dir := fmt.Sprint("many", i)
		require.NoError(t, os.Mkdir(filepath.Join(s.source, dir), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(s.source, dir, "f"), []byte("x"), 0o644))
		s.readSmall(t, dir, "f")
	}
	s.fs.ahead.mu.Lock()
	defer s.fs.ahead.mu.Unlock()
	assert.LessOrEqual(t, len(s.fs.ahead.dirs), aheadDirs)
}

// TestReadsAheadOnTrustOnce reads one file of each directory. If the directory before was read in order, read-ahead
// goes wrong in one directory only. If it was read at random, only one directory is listed.
func TestReadsAheadOnTrustOnce(t *testing.T) {
	for first, ahead := range map[string]int{"f0": aheadFirst, "f50": 0} {
		t.Run(first, func(t *testing.T) {
			s := mount(t)
			s.smallFiles(t, "d", 10, numbered)
			for i := range 10 {
				s.readSmall(t, "d", numbered(i))
			}
			before := s.fs.ahead.fetched.Load()
			const dirs = 5
			for i := range dirs {
				s.smallFiles(t, fmt.Sprint("e", i), 60, numbered)
				s.readSmall(t, fmt.Sprint("e", i), first)
			}
			assert.EqualValues(t, ahead, s.fs.ahead.fetched.Load()-before)
			listed := 0
			for _, d := range s.fs.ahead.dirs {
				if d.listing {
					listed++
				}
			}
			assert.Equal(t, 1, listed) // the first directory was read to its end, and is forgotten
		})
	}
}

// TestReadsAheadAgain: a data set that is read again is read ahead again, if the host has dropped it.
func TestReadsAheadAgain(t *testing.T) {
	s := mount(t, kernelOpens)
	const files = 100
	s.smallFiles(t, "d", files, numbered)
	for round := range int64(3) {
		for i := range files {
			s.readSmall(t, "d", numbered(i))
		}
		assert.Greater(t, s.fs.ahead.fetched.Load(), round*files+files/2)
		for i := range files {
			s.forget(t, filepath.Join(s.source, "d", numbered(i)))
			s.forget(t, filepath.Join(s.mnt, "d", numbered(i)))
		}
	}
}

// TestReadingAheadOpensRegularFilesOnly: a name that no longer leads to a regular file is not opened.
func TestReadingAheadOpensRegularFilesOnly(t *testing.T) {
	s := mount(t)
	require.NoError(t, unix.Mkfifo(filepath.Join(s.source, "fifo"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "file"), []byte("x"), 0o644))
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(watch)
	_, err = unix.InotifyAddWatch(watch, filepath.Join(s.source, "fifo"), unix.IN_OPEN)
	require.NoError(t, err)

	root, errno := s.fs.hold(s.fs.root)
	require.Zero(t, errno)
	defer s.fs.unhold(s.fs.root)
	fd, size, ok := s.fs.ahead.openSmall(s.fs.root, root, "file")
	require.True(t, ok)
	assert.EqualValues(t, 1, size)
	unix.Close(fd)
	_, _, ok = s.fs.ahead.openSmall(s.fs.root, root, "fifo")
	assert.False(t, ok)
	_, err = unix.Read(watch, make([]byte, 4096))
	assert.ErrorIs(t, err, unix.EAGAIN, "it was opened")
}

// TestReadsNothingAheadAtTheEnd: the end of the mount does not wait until all files are read ahead.
func TestReadsNothingAheadAtTheEnd(t *testing.T) {
	s := mount(t)
	s.smallFiles(t, "d", 20, numbered)
	s.fs.ahead.ending.Store(true)
	s.readSmall(t, "d", numbered(0), numbered(1), numbered(2), numbered(3))
	assert.Zero(t, s.fs.ahead.fetched.Load())
}

// TestReadsNothingAheadOfOneFile: to read one file again and again is not to read its directory in order.
func TestReadsNothingAheadOfOneFile(t *testing.T) {
	s := mount(t)
	s.smallFiles(t, "d", 3, numbered)
	s.readSmall(t, "d", numbered(0))
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, "d", numbered(0)), &st))
	n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	for range 2 * aheadNear {
		s.fs.ahead.read(n)
	}
	s.settleAhead()
	s.fs.ahead.mu.Lock()
	defer s.fs.ahead.mu.Unlock()
	for _, d := range s.fs.ahead.dirs {
		require.False(t, d.listing)
	}
}

// TestReadsAheadInBoundedMemory: the number of names of all followed directories is bounded. Directories that are not
// read in order keep none.
func TestReadsAheadInBoundedMemory(t *testing.T) {
	a := newAhead(nil)
	began := time.Now()
	for i := range aheadDirs - 1 {
		n := new(node)
		d := a.dirLocked(n)
		d.used, d.orders = began.Add(time.Duration(i)), []aheadOrder{{names: make([]string, aheadNames)}}
		if i == 0 {
			d.rest(10)
			continue
		}
		a.boundLocked(d)
		assert.Same(t, d, a.dirs[n])
	}
	assert.Len(t, a.dirs, 1+aheadAllNames/aheadNames)
}

func TestCompareNumbers(t *testing.T) {
	names := []string{"", "a", "a1", "a01", "a2", "a2b", "a10", "a10.1", "a10.02", "a10.10", "a99999999999999999999",
		"b", "b0"}
	sorted := slices.Clone(names)
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(sorted), func(i, j int) { sorted[i], sorted[j] = sorted[j], sorted[i] })
	slices.SortFunc(sorted, compareNumbers)
	for i, a := range sorted {
		for j, b := range sorted {
			assert.Equal(t, i < j, compareNumbers(a, b) < 0, "%q and %q", a, b)
			assert.Equal(t, i == j, compareNumbers(a, b) == 0, "%q and %q", a, b)
		}
	}
	for i, name := range []string{"", "a", "a01", "a1", "a2", "a2b", "a10", "a10.1", "a10.02", "a10.10",
		"a99999999999999999999", "b", "b0"} {
		assert.Equal(t, name, sorted[i])
	}
}
