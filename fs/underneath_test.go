package fs

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// uncached makes the kernel ask for names and attributes each time.
func uncached(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, -1 }

func TestSourceChangedUnderneathIsSeenAtOpen(t *testing.T) {
	s := mount(t)
	path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("a"), 10_000), 0644))
	read := func() string {
		t.Helper()
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		buf := make([]byte, 20_000)
		n, err := f.Read(buf)
		require.NoError(t, err)
		return string(buf[:n])
	}
	assert.Equal(t, strings.Repeat("a", 10_000), read())
	require.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")

	require.NoError(t, os.WriteFile(home, bytes.Repeat([]byte("b"), 10_000), 0644))
	assert.Equal(t, strings.Repeat("b", 10_000), read())
	require.NoError(t, os.Truncate(home, 5000))
	assert.Equal(t, strings.Repeat("b", 5000), read())
	assert.Positive(t, s.fs.changed.Load())
}

// TestOwnChangesAreNotTakenForForeign makes every kind of change through the mount.
func TestOwnChangesAreNotTakenForForeign(t *testing.T) {
	s := mount(t)
	sh(t, s.mnt, `
		echo one > f; cat f; echo two >> f; cat f; chmod 600 f; cat f; ln f g; cat g; mv g h; cat h; rm h; cat f
		touch f; cat f; truncate -s 100 f; cat f; fallocate -l 5000 f; cat f; mv f e; cat e; : > e; cat e
		echo x > v; cat v; mv v e; cat e; cp e c; cat c; dd if=e of=c bs=1 conv=notrunc oflag=direct 2>/dev/null || :; cat c`)
	assert.Zero(t, s.fs.changed.Load())
}

func TestNamesChangedUnderneath(t *testing.T) {
	s := mount(t, uncached)
	at, home := func(n string) string { return filepath.Join(s.mnt, n) },
		func(n string) string { return filepath.Join(s.source, n) }
	require.NoError(t, os.WriteFile(at("f"), []byte("first"), 0644))
	require.NoError(t, os.Mkdir(at("d"), 0755))
	require.NoError(t, os.WriteFile(at("d/in"), []byte("in"), 0644))

	require.NoError(t, os.Remove(home("f")))
	_, err := os.Stat(at("f"))
	assert.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(home("f"), []byte("second"), 0644))
	got, err := os.ReadFile(at("f"))
	require.NoError(t, err)
	assert.Equal(t, "second", string(got))

	require.NoError(t, os.Rename(home("d"), home("e")))
	got, err = os.ReadFile(at("e/in"))
	require.NoError(t, err)
	assert.Equal(t, "in", string(got))
	_, err = os.ReadFile(at("d/in"))
	assert.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.Remove(home("f")))
	require.NoError(t, os.Mkdir(home("f"), 0755))
	st, err := os.Stat(at("f"))
	require.NoError(t, err)
	assert.True(t, st.IsDir())
}

// TestFileReplacedBetweenLookupAndOpen makes the kernel use what it has cached of a file that was replaced.
func TestFileReplacedBetweenLookupAndOpen(t *testing.T) {
	s := mount(t)
	path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
	require.NoError(t, os.WriteFile(home, []byte("first"), 0644))
	_, err := os.Stat(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(home+".new", []byte("second"), 0644))
	require.NoError(t, os.Rename(home+".new", home))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "second", string(got))

	require.NoError(t, os.Remove(home))
	require.NoError(t, unix.Mkfifo(home, 0644))
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &st))
	assert.EqualValues(t, unix.S_IFIFO, st.Mode&unix.S_IFMT)
	require.NoError(t, unix.Close(fd))
}

// TestFileMadeUnderneathIsChecked creates a file that does not exist in the kernel's cache, but was made in SOURCE. The
// permissions of that file count.
func TestFileMadeUnderneathIsChecked(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	require.NoError(t, os.Mkdir(filepath.Join(s.mnt, "d"), 0777))
	require.NoError(t, os.Chmod(filepath.Join(s.mnt, "d"), 0777))
	path, home := filepath.Join(s.mnt, "d/f"), filepath.Join(s.source, "d/f")
	_, err := os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(home, []byte("root's"), 0600))
	out, err := user(shell(s.mnt, "echo mine > d/f"), alice, aliceOwn).CombinedOutput()
	assert.Error(t, err, string(out))
	got, err := os.ReadFile(home)
	require.NoError(t, err)
	assert.Equal(t, "root's", string(got))

	_, err = os.Stat(path + "2")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(home+"2", []byte("before"), 0600))
	f, err := os.OpenFile(path+"2", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0600)
	require.NoError(t, err)
	_, err = f.WriteString(" and after")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	got, err = os.ReadFile(home + "2")
	require.NoError(t, err)
	assert.Equal(t, "before and after", string(got))
	f, err = os.OpenFile(path+"3", os.O_CREATE|os.O_EXCL, 0600)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = os.OpenFile(path+"3", os.O_CREATE|os.O_EXCL, 0600)
	assert.ErrorIs(t, err, os.ErrExist)
}

// TestAppendAfterFileGrewUnderneath appends to a file whose end the kernel does not know.
func TestAppendAfterFileGrewUnderneath(t *testing.T) {
	s := mount(t, func(o *Options) { o.AttrTimeout, o.Events = 3600e9, EventsOff })
	path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0600)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("one ")
	require.NoError(t, err)
	other, err := os.OpenFile(home, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	_, err = other.WriteString("two ")
	require.NoError(t, err)
	require.NoError(t, other.Close())
	_, err = f.WriteString("three")
	require.NoError(t, err)
	// The file is not opened anew, and the kernel goes by its own size.
	got := make([]byte, 9)
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, "one two t", string(got))
	got, err = os.ReadFile(home)
	require.NoError(t, err)
	assert.Equal(t, "one two three", string(got))
	got, err = os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "one two three", string(got))
}

// requests collects the kernel's requests from the debug log.
type requests struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *requests) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

// take returns the number of requests of each kind since its last call.
func (r *requests) take() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := map[string]int{}
	for line := range strings.Lines(r.text.String()) {
		if _, rest, ok := strings.Cut(line, `msg="rx `); ok {
			counts[strings.Fields(rest)[1]]++
		}
	}
	r.text.Reset()
	return counts
}

func (r *requests) options(o *Options) {
	o.Debug = true
	o.Log = slog.New(slog.NewTextHandler(r, nil))
}

func TestOneRequestForOneWrite(t *testing.T) {
	r := new(requests)
	s := mount(t, r.options)
	f, err := os.Create(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	defer f.Close()
	page := make([]byte, 4096)
	_, err = f.WriteAt(page, 0) // the first write may ask for security.capability
	require.NoError(t, err)
	r.take()
	for i := range int64(10) {
		_, err = f.WriteAt(page, i*4096)
		require.NoError(t, err)
	}
	counts := r.take()
	delete(counts, "RELEASE") // of an earlier open; close(2) does not wait for it
	assert.Equal(t, map[string]int{"WRITE": 10}, counts)
	_, err = f.ReadAt(make([]byte, 40960), 0)
	require.NoError(t, err)
	assert.Zero(t, r.take()["READ"], "the kernel has these pages")
}

func TestSynchronousWritesReachTheDisk(t *testing.T) {
	r := new(requests)
	s := mount(t, r.options)
	for name, flag := range map[string]int{"O_SYNC": unix.O_SYNC, "O_DSYNC": unix.O_DSYNC,
		"O_DIRECT|O_SYNC": unix.O_DIRECT | unix.O_SYNC} {
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_WRONLY|flag, 0600)
		require.NoError(t, err)
		r.take()
		_, err = f.Write(make([]byte, 4096))
		require.NoError(t, err)
		assert.Equal(t, 1, r.take()["FSYNC"], name)
		require.NoError(t, f.Close())
	}
	f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_RDWR, 0600)
	require.NoError(t, err)
	defer f.Close()
	r.take()
	_, err = unix.Pwritev2(int(f.Fd()), [][]byte{make([]byte, 10)}, 0, unix.RWF_DSYNC)
	require.NoError(t, err)
	assert.Equal(t, 1, r.take()["FSYNC"], "RWF_DSYNC")
	assert.NoError(t, syscall.Fdatasync(int(f.Fd())))
}

// TestOwnChangesAtOnceAreNotTakenForForeign: writes and changes of metadata overlap, and each records the attributes
// after it.
func TestOwnChangesAtOnceAreNotTakenForForeign(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(path, make([]byte, 64<<10), 0644))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				for n := range 300 {
					switch i {
					case 0, 1:
						assert.NoError(t, f.Chmod(os.FileMode(0600+n%2)))
					case 2:
						assert.NoError(t, unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE))
					default:
						_, err := f.WriteAt([]byte{byte(n)}, int64(n%16*4096))
						assert.NoError(t, err)
					}
				}
			})
		}
		all.Wait()
		_, err = os.ReadFile(path)
		require.NoError(t, err)
		assert.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")
	})
}
