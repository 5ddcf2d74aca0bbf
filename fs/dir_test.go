package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// entry is a name in a directory and the offset after it.
type entry struct {
	name string
	off  int64
}

// readEntries reads the entries of an open directory from its position on. If some > 0, it reads at most some entries.
func readEntries(t *testing.T, fd, some int) []entry {
	t.Helper()
	var all []entry
	buf := make([]byte, 4096)
	for some <= 0 || len(all) < some {
		n, err := unix.Getdents(fd, buf)
		require.NoError(t, err)
		if n == 0 {
			break
		}
		for p := buf[:n]; len(p) > 0; {
			e := parseDirent(p)
			if name := string(e.name); name != "." && name != ".." {
				all = append(all, entry{name, e.offset})
			}
			p = p[e.size:]
		}
	}
	return all
}

func TestManyEntries(t *testing.T) {
	const count = 100_000
	s := mount(t)
	dir := filepath.Join(s.source, "many")
	require.NoError(t, os.Mkdir(dir, 0755))
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	first := fmt.Sprintf("entry-%06d", 0)
	file, err := unix.Openat(fd, first, unix.O_CREAT, 0600)
	require.NoError(t, err)
	unix.Close(file)
	for i := 1; i < count; i++ {
		if i%50_000 == 0 { // ext4 allows 65,000 links
			first = fmt.Sprintf("entry-%06d", i)
			file, err := unix.Openat(fd, first, unix.O_CREAT, 0600)
			require.NoError(t, err)
			unix.Close(file)
			continue
		}
		require.NoError(t, unix.Linkat(fd, first, fd, fmt.Sprintf("entry-%06d", i), 0))
	}

	mounted, err := unix.Open(filepath.Join(s.mnt, "many"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	defer unix.Close(mounted)
	all := readEntries(t, mounted, 0)
	names := make(map[string]bool, count)
	for _, e := range all {
		names[e.name] = true
	}
	assert.Len(t, all, count)
	assert.Len(t, names, count)

	for _, i := range []int{0, 1, 17, 4999, 50_000, count - 2} {
		_, err := unix.Seek(mounted, all[i].off, unix.SEEK_SET)
		require.NoError(t, err)
		assert.Equal(t, all[i+1].name, readEntries(t, mounted, 1)[0].name)
	}
	_, err = unix.Seek(mounted, 0, unix.SEEK_SET)
	require.NoError(t, err)
	assert.Equal(t, all[0], readEntries(t, mounted, 1)[0])
}

// TestStatOfManyKeepsFewDescriptors looks at more files than nodes may keep descriptors.
func TestStatOfManyKeepsFewDescriptors(t *testing.T) {
	s := mount(t)
	s.fs.descriptors.mu.Lock()
	s.fs.descriptors.limit = 64
	s.fs.descriptors.mu.Unlock()
	for d := range 20 {
		dir := filepath.Join(s.source, fmt.Sprint("d", d))
		require.NoError(t, os.Mkdir(dir, 0755))
		for f := range 50 {
			require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("f", f)), []byte("content"), 0600))
		}
	}
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := range 1000 {
				n := (i*7 + worker*13) % 1000
				path := filepath.Join(s.mnt, fmt.Sprint("d", n/50), fmt.Sprint("f", n%50))
				if !assert.NoError(t, os.Chmod(path, 0640)) {
					return
				}
				got, err := os.ReadFile(path)
				if !assert.NoError(t, err) || !assert.Equal(t, "content", string(got)) {
					return
				}
			}
		})
	}
	all.Wait()
	assert.LessOrEqual(t, s.fs.descriptors.count(), 64+8)
}

func TestInodeNumbersAndDirectoryEntriesAgree(t *testing.T) {
	s := mount(t)
	for i := range 10 {
		require.NoError(t, os.WriteFile(filepath.Join(s.source, fmt.Sprint(i)), nil, 0600))
	}
	fd, err := unix.Open(s.mnt, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	buf := make([]byte, 4096)
	n, err := unix.Getdents(fd, buf)
	require.NoError(t, err)
	for p := buf[:n]; len(p) > 0; {
		e := parseDirent(p)
		p = p[e.size:]
		if !entryName(string(e.name)) {
			continue
		}
		var mine, home unix.Stat_t
		require.NoError(t, unix.Fstatat(fd, string(e.name), &mine, 0))
		require.NoError(t, unix.Stat(filepath.Join(s.source, string(e.name)), &home))
		assert.Equal(t, home.Ino, mine.Ino)
		assert.Equal(t, home.Ino, e.ino)
	}
}

// TestNamesMoveWhileTheyAreUsed renames, removes and makes files in a few directories, and renames these directories,
// while other programs use them. Nodes have few descriptors, so they are often found again by name.
func TestNamesMoveWhileTheyAreUsed(t *testing.T) {
	s := mount(t, func(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, -1 })
	s.fs.descriptors.mu.Lock()
	s.fs.descriptors.limit = 2
	s.fs.descriptors.mu.Unlock()
	require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "a/x/y"), 0755))
	require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "b"), 0755))
	keep, err := os.OpenFile(filepath.Join(s.mnt, "a/x/y/keep"), os.O_CREATE|os.O_RDWR, 0600)
	require.NoError(t, err)
	defer keep.Close()
	inside, err := unix.Open(filepath.Join(s.mnt, "a/x/y"), unix.O_PATH, 0)
	require.NoError(t, err)
	defer unix.Close(inside)

	stop := make(chan struct{})
	var moving sync.WaitGroup
	moving.Go(func() {
		from, to := filepath.Join(s.mnt, "a/x"), filepath.Join(s.mnt, "b/z")
		for {
			select {
			case <-stop:
				return
			default:
			}
			if !assert.NoError(t, os.Rename(from, to)) {
				return
			}
			from, to = to, from
		}
	})
	var using sync.WaitGroup
	for worker := range 3 {
		using.Go(func() {
			name, other := fmt.Sprint("w", worker), fmt.Sprint("v", worker)
			for range 300 {
				fd, err := unix.Openat(inside, name, unix.O_CREAT|unix.O_RDWR|unix.O_EXCL, 0600)
				if !assert.NoError(t, err) {
					return
				}
				assert.NoError(t, unix.Renameat(inside, name, inside, other))
				assert.NoError(t, unix.Fchmod(fd, 0640))
				assert.NoError(t, unix.Fchmodat(inside, "keep", 0600+uint32(worker), 0))
				assert.NoError(t, unix.Unlinkat(inside, other, 0))
				_, err = unix.Pwrite(fd, []byte("after"), 0)
				assert.NoError(t, err)
				var st unix.Stat_t
				assert.NoError(t, unix.Fstat(fd, &st))
				assert.EqualValues(t, 0, st.Nlink)
				assert.NoError(t, unix.Close(fd))
				if t.Failed() {
					return
				}
			}
		})
	}
	using.Wait()
	close(stop)
	moving.Wait()
}
