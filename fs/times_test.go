package fs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// clockStep is how far the times of files may lag behind the clock.
const clockStep = 20 * time.Millisecond

// TestReleaseIsTheMomentOfModification follows a file's mtime through releases, collects, and programs' changes in
// between.
func TestReleaseIsTheMomentOfModification(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const size = 64 << 10
		path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.Write(make([]byte, size))
		require.NoError(t, err)
		w := mapOn(t, cache, n, f, 0, size)
		defer w.close(t)
		mtime := func() time.Time {
			t.Helper()
			st, err := os.Stat(path)
			require.NoError(t, err)
			return st.ModTime()
		}
		homes := func() time.Time {
			t.Helper()
			st, err := os.Stat(home)
			require.NoError(t, err)
			return st.ModTime()
		}
		set := func(at time.Time) {
			t.Helper()
			require.NoError(t, os.Chtimes(path, time.Time{}, at))
			require.True(t, at.Equal(mtime()))
		}
		release := func(text string) time.Time {
			t.Helper()
			before := time.Now().Add(-clockStep)
			w.store(t, 5000, []byte(text))
			w.release(t, size)
			got := mtime()
			assert.True(t, got.After(before), "%v is not after %v", got, before)
			assert.False(t, got.After(time.Now()))
			return got
		}
		old, newer := time.Unix(1e9, 0), time.Unix(11e8, 5)

		set(old)
		at := release("one")
		require.NoError(t, f.Sync())
		assert.True(t, at.Equal(mtime()), "fsync brings bytes home, and modifies nothing")
		assert.True(t, at.Equal(homes()), "%v in SOURCE, %v on the mount", homes(), at)
		w.release(t, size)
		assert.True(t, at.Equal(mtime()), "a release of nothing")

		release("two")
		set(newer)
		require.NoError(t, f.Sync())
		assert.True(t, newer.Equal(mtime()), "set after the release")
		assert.True(t, newer.Equal(homes()))

		release("ten")
		set(old)
		w.release(t, size)
		assert.True(t, old.Equal(mtime()), "what was released before the time was set is not released again")

		at = release("six")
		b := make([]byte, 3)
		_, err = f.ReadAt(b, 5000) // makes the daemon collect
		require.NoError(t, err)
		require.Equal(t, "six", string(b))
		assert.True(t, at.Equal(mtime()), "reading modifies nothing")

		set(old)
		release("ten")
		set(old)
		before := time.Now().Add(-clockStep)
		_, err = f.WriteAt([]byte("cpu"), 5100)
		require.NoError(t, err)
		assert.True(t, mtime().After(before), "a write after the release")
		require.NoError(t, f.Sync())
		assert.True(t, mtime().After(before))
		assert.True(t, homes().After(before))

		// The comparisons that make does.
		sh(t, s.mnt, "touch -d '1 hour ago' f; touch -d '1 minute ago' made")
		release("new")
		sh(t, s.mnt, "test f -nt made")
		sh(t, s.mnt, "touch -d '1 hour ago' f; sync f; test made -nt f; cat f > /dev/null; test made -nt f")
		assert.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")
	})
}

// TestReleaseMovesTheTimeOfAFileWithoutName does this with an open file that was removed.
func TestReleaseMovesTheTimeOfAFileWithoutName(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		defer f.Close()
		require.NoError(t, f.Truncate(4096))
		require.NoError(t, os.Remove(f.Name()))
		w := mapOn(t, cache, n, f, 0, 4096)
		require.NoError(t, unix.UtimesNanoAt(int(f.Fd()), "", []unix.Timespec{{Sec: 5}, {Sec: 6}}, unix.AT_EMPTY_PATH))
		before := time.Now().Add(-clockStep)
		w.store(t, 0, []byte("x"))
		w.release(t, 4096)
		st, err := f.Stat()
		require.NoError(t, err)
		if os.Geteuid() == 0 || !s.WriteBack() {
			assert.True(t, st.ModTime().After(before), "%v", st.ModTime())
		}
		w.close(t)
	})
}

// TestTimesOfATruncationToTheSameSize: on XFS, truncate(2) to a file's current size leaves its times, and ftruncate(2)
// does not.
func TestTimesOfATruncationToTheSameSize(t *testing.T) {
	s := mount(t, sourceOn(t, "xfs", 512<<20))
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("text"), 0o644))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	old := time.Unix(1e9, 0)
	for moves, truncate := range map[bool]func() error{
		false: func() error { return unix.Truncate(path, 4) },
		true:  func() error { return f.Truncate(4) },
	} {
		require.NoError(t, os.Chtimes(path, old, old))
		require.NoError(t, truncate())
		for _, at := range []string{path, filepath.Join(s.source, "f")} {
			st, err := os.Stat(at)
			require.NoError(t, err)
			assert.Equal(t, moves, !st.ModTime().Equal(old), at)
		}
	}
}

// TestTimesAreThoseOfSource: once a program has closed a file, the mount shows SOURCE's mtime, and that time does not
// change any more. The kernel's clock stands still for some milliseconds, so most of the steps fall in one moment.
func TestTimesAreThoseOfSource(t *testing.T) {
	old := unix.Timespec{Sec: 1e9, Nsec: 123456789}
	setOld := func(t *testing.T, f *os.File) {
		require.NoError(t, unix.UtimesNanoAt(int(f.Fd()), "", []unix.Timespec{old, old}, unix.AT_EMPTY_PATH))
	}
	write := func(t *testing.T, f *os.File) {
		_, err := f.WriteAt(make([]byte, 3000), 0)
		require.NoError(t, err)
	}
	reopen := func(t *testing.T, f *os.File, flags int) *os.File {
		again, err := os.OpenFile(f.Name(), flags, 0)
		require.NoError(t, err)
		t.Cleanup(func() { again.Close() })
		return again
	}
	const recent = false
	for name, x := range map[string]struct {
		steps func(t *testing.T, f *os.File)
		old   bool // the time is the one that was set
	}{
		"write":               {write, recent},
		"write, fsync":        {func(t *testing.T, f *os.File) { write(t, f); require.NoError(t, f.Sync()) }, recent},
		"write, fsync, write": {func(t *testing.T, f *os.File) { write(t, f); require.NoError(t, f.Sync()); write(t, f) }, recent},
		"large write": {func(t *testing.T, f *os.File) {
			_, err := f.Write(make([]byte, 9<<20))
			require.NoError(t, err)
		}, recent},
		"O_TRUNC": {func(t *testing.T, f *os.File) {
			write(t, f)
			require.NoError(t, f.Sync())
			require.NoError(t, reopen(t, f, os.O_WRONLY|os.O_TRUNC).Close())
		}, recent},
		"O_TRUNC, write": {func(t *testing.T, f *os.File) {
			write(t, f)
			require.NoError(t, f.Close())
			again := reopen(t, f, os.O_WRONLY|os.O_TRUNC)
			write(t, again)
			require.NoError(t, again.Close())
		}, recent},
		"ftruncate": {func(t *testing.T, f *os.File) { write(t, f); require.NoError(t, f.Truncate(10)) }, recent},
		"truncate to the same size": {func(t *testing.T, f *os.File) {
			require.NoError(t, unix.Truncate(f.Name(), 0))
			require.NoError(t, unix.Truncate(f.Name(), 0))
		}, recent},
		"fallocate": {func(t *testing.T, f *os.File) {
			write(t, f)
			require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 0, 10_000))
		}, recent},
		"punch a hole": {func(t *testing.T, f *os.File) {
			write(t, f)
			const hole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
			require.NoError(t, unix.Fallocate(int(f.Fd()), hole, 0, 100))
		}, recent},
		"copy_file_range": {func(t *testing.T, f *os.File) {
			write(t, f)
			to := int64(5000)
			_, err := unix.CopyFileRange(int(reopen(t, f, os.O_RDONLY).Fd()), nil, int(f.Fd()), &to, 1000, 0)
			require.NoError(t, err)
		}, recent},
		"direct write": {func(t *testing.T, f *os.File) {
			block, err := unix.Mmap(-1, 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			require.NoError(t, err)
			defer unix.Munmap(block)
			write(t, f)
			_, err = reopen(t, f, os.O_RDWR|unix.O_DIRECT).WriteAt(block, 0)
			require.NoError(t, err)
		}, recent},
		"store by mmap": {func(t *testing.T, f *os.File) {
			write(t, f)
			setOld(t, f)
			run(t, program("store by mmap", f.Name(), "100", "text"))
		}, recent},
		"set, write": {func(t *testing.T, f *os.File) { setOld(t, f); write(t, f) }, recent},
		"write, set": {func(t *testing.T, f *os.File) { write(t, f); setOld(t, f) }, true},
		"set, chmod": {func(t *testing.T, f *os.File) { write(t, f); setOld(t, f); require.NoError(t, f.Chmod(0o600)) }, true},
		"set, rename": {func(t *testing.T, f *os.File) {
			write(t, f)
			setOld(t, f)
			require.NoError(t, os.Rename(f.Name(), f.Name()+"2"))
			require.NoError(t, os.Rename(f.Name()+"2", f.Name()))
		}, true},
		"set, link": {func(t *testing.T, f *os.File) {
			write(t, f)
			setOld(t, f)
			require.NoError(t, os.Link(f.Name(), f.Name()+"2"))
			require.NoError(t, os.Remove(f.Name()+"2"))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			everyMode(t, func(t *testing.T, s *scene) {
				path := filepath.Join(s.mnt, "f")
				began := time.Now().Add(-clockStep)
				for range 10 {
					f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
					require.NoError(t, err)
					x.steps(t, f)
					f.Close()
					on, err := os.Stat(path)
					require.NoError(t, err)
					in, err := os.Stat(filepath.Join(s.source, "f"))
					require.NoError(t, err)
					assert.Equal(t, in.ModTime(), on.ModTime(), "the mount does not show SOURCE's time")
					if x.old {
						assert.Equal(t, time.Unix(old.Unix()), on.ModTime())
					} else {
						assert.True(t, on.ModTime().After(began), "%v", on.ModTime())
					}
					require.NoError(t, os.Remove(path))
				}
				assert.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")
			})
		})
	}
}

// TestTimesThatTheKernelKeeps checks what the documents say of atime and ctime: cached reads do not move atime,
// and with write-back caching the mount shows a ctime of its own.
func TestTimesThatTheKernelKeeps(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		require.NoError(t, err)
		defer f.Close()
		page := make([]byte, page.Size)
		_, err = f.WriteAt(page, 0)
		require.NoError(t, err)
		for written := time.Now(); time.Since(written) < 2*clockStep; {
			_, err = f.ReadAt(page, 0)
			require.NoError(t, err)
		}
		require.NoError(t, f.Sync())
		var on, in unix.Stat_t
		require.NoError(t, unix.Stat(path, &on))
		require.NoError(t, unix.Stat(home, &in))
		assert.Equal(t, in.Mtim, on.Mtim)
		assert.Equal(t, in.Atim, on.Atim)
		assert.LessOrEqual(t, in.Atim.Nano(), in.Mtim.Nano(), "a cached read moved atime")
		assert.Equal(t, s.WriteBack(), in.Ctim.Nano() > on.Ctim.Nano(), "%v in SOURCE, %v on the mount", in.Ctim, on.Ctim)
	})
}

// TestLocksDoNotReachSource: docs/consistency.md says that locks on the mount do not exclude programs in SOURCE.
func TestLocksDoNotReachSource(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), nil, 0o644))
		var files []*os.File
		for _, dir := range []string{s.mnt, s.source, s.mnt} {
			f, err := os.OpenFile(filepath.Join(dir, "f"), os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			files = append(files, f)
		}
		whole := &unix.Flock_t{Type: unix.F_WRLCK}
		for i, want := range []error{nil, nil, unix.EAGAIN} {
			fd := files[i].Fd()
			require.ErrorIs(t, unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB), want)
			require.ErrorIs(t, unix.FcntlFlock(fd, unix.F_OFD_SETLK, whole), want)
		}
	})
}

// TestWritesPastTheLargestFile: with write-back caching, the kernel does not know how large a file in SOURCE may be.
func TestWritesPastTheLargestFile(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		const far = 1 << 62
		home, err := os.Create(filepath.Join(s.source, "home"))
		require.NoError(t, err)
		defer home.Close()
		if _, err := home.WriteAt([]byte("x"), far); err == nil {
			t.Skip("SOURCE takes files of any size")
		}
		f, err := os.Create(filepath.Join(s.mnt, "f"))
		require.NoError(t, err)
		_, err = f.WriteAt([]byte("x"), far)
		if !s.WriteBack() {
			require.ErrorIs(t, err, unix.EFBIG)
			require.NoError(t, f.Close())
			return
		}
		require.NoError(t, err)
		require.ErrorIs(t, f.Sync(), unix.EFBIG)
		_, err = f.WriteAt([]byte("x"), far)
		require.NoError(t, err)
		require.Error(t, f.Close())
	})
}

// TestTimesThatSourceRefuses: SOURCE does not let the daemon set the times of a file. fsync and close do not fail for
// that. A program that sets them gets the error.
func TestTimesThatSourceRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make a file append-only")
	}
	const appendOnly = 0x20
	s := mount(t, writeBack)
	path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	if err := changeFlags(home, appendOnly, 0); err != nil {
		t.Skip("SOURCE has no files that allow only appending: ", err)
	}
	defer func() { require.NoError(t, changeFlags(home, 0, appendOnly)) }()
	for range 2 {
		_, err = f.WriteString("text") // through a descriptor that is older than the flag
		require.NoError(t, err)
		for written := time.Now(); time.Since(written) < 2*clockStep; {
			_, err = f.WriteString("t")
			require.NoError(t, err)
		}
		require.NoError(t, f.Sync())
	}
	require.ErrorIs(t, os.Chtimes(path, time.Unix(1e9, 0), time.Unix(1e9, 0)), unix.EPERM)
	require.NoError(t, f.Close())
}
