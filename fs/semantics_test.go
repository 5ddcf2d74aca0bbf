package fs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	programs["append"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0644)
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		for i := range n {
			if _, err := fmt.Fprintf(f, "writer %s line %03d of %d\n", args[1], i, n); err != nil {
				return err
			}
		}
		return f.Close()
	}
}

func TestAppendByManyProcesses(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		const writers, lines = 16, 100
		path := filepath.Join(s.mnt, "log")
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				out, err := program("append", path, strconv.Itoa(w), strconv.Itoa(lines)).CombinedOutput()
				assert.NoError(t, err, string(out))
			})
		}
		all.Wait()
		require.NoError(t, s.Unmount())
		got, err := os.ReadFile(filepath.Join(s.source, "log"))
		require.NoError(t, err)
		seen := map[string]bool{}
		for line := range strings.Lines(string(got)) {
			seen[line] = true
		}
		for w := range writers {
			for i := range lines {
				assert.True(t, seen[fmt.Sprintf("writer %d line %03d of %d\n", w, i, lines)])
			}
		}
		assert.Len(t, seen, writers*lines)
	})
}

func TestOpenWriteOnly(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		want := bytes.Repeat([]byte("0123456789"), 1000)
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), want, 0644))
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte("abc"), 5001)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		require.NoError(t, f.Close())
		copy(want[5001:], "abc")
		got, err := os.ReadFile(filepath.Join(s.source, "f"))
		require.NoError(t, err)
		assert.Equal(t, want, got)
	})
}

// A fault on a mapped page blocks a thread without the runtime's knowledge. So only other processes use mappings: with
// one processor, the daemon in this process could never serve the fault.
func init() {
	programs["map"] = func(args []string) error {
		flags, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		f, err := os.OpenFile(args[0], os.O_RDWR|flags, 0)
		if err != nil {
			return err
		}
		m, err := unix.Mmap(int(f.Fd()), 0, 4*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		copy(m[4096:], fmt.Sprintf("%08x", flags))
		copy(m[3*4096+100:], "past the end")
		if err := unix.Msync(m, unix.MS_SYNC); err != nil {
			return err
		}
		if err := unix.Munmap(m); err != nil {
			return err
		}
		private, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		copy(private, "mine alone")
		return f.Close()
	}
}

func TestMappings(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(path, make([]byte, 3*4096+100), 0644))
		for _, flags := range []int{0, os.O_APPEND, unix.O_DIRECT, os.O_SYNC} {
			run(t, program("map", path, strconv.Itoa(flags)))
			got, err := os.ReadFile(filepath.Join(s.source, "f"))
			require.NoError(t, err)
			require.Len(t, got, 3*4096+100)
			mark := fmt.Sprintf("%08x", flags)
			assert.Equal(t, mark, string(got[4096:4096+len(mark)]))
			assert.Equal(t, make([]byte, 4096), got[:4096])
		}
	})
}

func TestDeletedWhileOpen(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0600)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.WriteString("before")
		require.NoError(t, err)
		require.NoError(t, os.Remove(path))
		_, err = f.WriteAt([]byte(" and after"), 6)
		require.NoError(t, err)
		require.NoError(t, f.Chmod(0640))
		require.NoError(t, f.Truncate(11))
		st, err := f.Stat()
		require.NoError(t, err)
		assert.EqualValues(t, 0, st.Sys().(*syscall.Stat_t).Nlink)
		assert.EqualValues(t, 11, st.Size())
		assert.EqualValues(t, 0640, st.Mode().Perm())
		got := make([]byte, 11)
		_, err = f.ReadAt(got, 0)
		require.NoError(t, err)
		assert.Equal(t, "before and ", string(got))
		again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
		require.NoError(t, err)
		assert.NoError(t, again.Close())
	})
}

func TestRenamedOver(t *testing.T) {
	s := mount(t)
	a, b := filepath.Join(s.mnt, "a"), filepath.Join(s.mnt, "b")
	require.NoError(t, os.WriteFile(a, []byte("new"), 0600))
	require.NoError(t, os.WriteFile(b, []byte("old"), 0600))
	old, err := os.OpenFile(b, os.O_RDWR, 0)
	require.NoError(t, err)
	defer old.Close()
	require.NoError(t, os.Rename(a, b))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(old.Fd()), &st))
	assert.EqualValues(t, 0, st.Nlink)
	require.NoError(t, unix.Fchmod(int(old.Fd()), 0644))
	got := make([]byte, 3)
	_, err = old.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, "old", string(got))
	got, err = os.ReadFile(b)
	require.NoError(t, err)
	assert.Equal(t, "new", string(got))
}

func TestRenameFlags(t *testing.T) {
	s := mount(t)
	require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "d/sub"), 0755))
	a, b := filepath.Join(s.mnt, "a"), filepath.Join(s.mnt, "d/b")
	require.NoError(t, os.WriteFile(a, []byte("a"), 0600))
	require.NoError(t, os.WriteFile(b, []byte("b"), 0600))
	assert.Equal(t, unix.EEXIST, unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_NOREPLACE))
	require.NoError(t, unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE))
	got, err := os.ReadFile(a)
	require.NoError(t, err)
	assert.Equal(t, "b", string(got))
	got, err = os.ReadFile(b)
	require.NoError(t, err)
	assert.Equal(t, "a", string(got))
	// A file in exchange for a directory. The directory is then found under its new name without a new lookup.
	require.NoError(t, unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, filepath.Join(s.mnt, "d/sub"),
		unix.RENAME_EXCHANGE))
	require.NoError(t, os.WriteFile(filepath.Join(a, "inside"), nil, 0600))
	_, err = os.Stat(filepath.Join(s.source, "a/inside"))
	assert.NoError(t, err)
	if os.Geteuid() == 0 {
		require.NoError(t, unix.Renameat2(unix.AT_FDCWD, b, unix.AT_FDCWD, filepath.Join(s.mnt, "d/c"),
			unix.RENAME_WHITEOUT))
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(filepath.Join(s.source, "d/b"), &st))
		assert.EqualValues(t, unix.S_IFCHR, st.Mode&unix.S_IFMT)
	}
}

func TestTemporaryFile(t *testing.T) {
	s := mount(t)
	fd, err := unix.Open(s.mnt, unix.O_TMPFILE|unix.O_RDWR, 0640)
	require.NoError(t, err)
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("named later"))
	require.NoError(t, err)
	require.NoError(t, unix.Linkat(unix.AT_FDCWD, procPath(fd), unix.AT_FDCWD, filepath.Join(s.mnt, "name"),
		unix.AT_SYMLINK_FOLLOW))
	got, err := os.ReadFile(filepath.Join(s.source, "name"))
	require.NoError(t, err)
	assert.Equal(t, "named later", string(got))
	var a, b unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &a))
	require.NoError(t, unix.Stat(filepath.Join(s.mnt, "name"), &b))
	assert.Equal(t, a.Ino, b.Ino)
	assert.EqualValues(t, 1, b.Nlink)

	exclusive, err := unix.Open(s.mnt, unix.O_TMPFILE|unix.O_RDWR|unix.O_EXCL, 0640)
	require.NoError(t, err)
	defer unix.Close(exclusive)
	assert.Equal(t, unix.ENOENT, unix.Linkat(unix.AT_FDCWD, procPath(exclusive), unix.AT_FDCWD,
		filepath.Join(s.mnt, "never"), unix.AT_SYMLINK_FOLLOW))
}

func TestHardLinks(t *testing.T) {
	s := mount(t)
	require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "x/y"), 0755))
	a, b := filepath.Join(s.mnt, "a"), filepath.Join(s.mnt, "x/y/b")
	require.NoError(t, os.WriteFile(a, []byte("one"), 0600))
	require.NoError(t, os.Link(a, b))
	var sa, sb, back unix.Stat_t
	require.NoError(t, unix.Stat(a, &sa))
	require.NoError(t, unix.Stat(b, &sb))
	require.NoError(t, unix.Stat(filepath.Join(s.source, "a"), &back))
	assert.Equal(t, sa.Ino, sb.Ino)
	assert.Equal(t, back.Ino, sa.Ino)
	assert.EqualValues(t, 2, sa.Nlink)
	require.NoError(t, os.Remove(a))
	require.NoError(t, os.Chmod(b, 0400))
	got, err := os.ReadFile(b)
	require.NoError(t, err)
	assert.Equal(t, "one", string(got))
	require.NoError(t, os.Symlink("nowhere", filepath.Join(s.mnt, "link")))
	require.NoError(t, unix.Linkat(unix.AT_FDCWD, filepath.Join(s.mnt, "link"), unix.AT_FDCWD,
		filepath.Join(s.mnt, "link2"), 0))
	target, err := os.Readlink(filepath.Join(s.mnt, "link2"))
	require.NoError(t, err)
	assert.Equal(t, "nowhere", target)
}

func TestTimes(t *testing.T) {
	s := mount(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, nil, 0600))
	require.NoError(t, os.Symlink("f", filepath.Join(s.mnt, "link")))
	for _, name := range []string{"f", "link", "."} {
		for _, at := range []time.Time{time.Unix(1_700_000_000, 123_456_789), time.Unix(-1000, 1)} {
			ts := []unix.Timespec{{Sec: at.Unix(), Nsec: int64(at.Nanosecond())},
				{Sec: at.Unix() + 1, Nsec: 999_999_999}}
			require.NoError(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(s.mnt, name), ts,
				unix.AT_SYMLINK_NOFOLLOW))
			var st unix.Stat_t
			for _, dir := range []string{s.mnt, s.source} {
				require.NoError(t, unix.Lstat(filepath.Join(dir, name), &st))
				assert.Equal(t, ts, []unix.Timespec{st.Atim, st.Mtim}, name)
			}
		}
	}
	var mine, home unix.Statx_t
	require.NoError(t, unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BTIME, &mine))
	require.NoError(t, unix.Statx(unix.AT_FDCWD, filepath.Join(s.source, "f"), 0, unix.STATX_BTIME, &home))
	assert.Equal(t, home.Mask&unix.STATX_BTIME, mine.Mask&unix.STATX_BTIME)
	assert.Equal(t, home.Btime, mine.Btime)
}

func TestNamesAndPathsAtTheirLimits(t *testing.T) {
	s := mount(t)
	longest := strings.Repeat("n", 255)
	require.NoError(t, os.WriteFile(filepath.Join(s.mnt, longest), []byte("x"), 0600))
	_, err := os.Stat(filepath.Join(s.source, longest))
	require.NoError(t, err)
	assert.ErrorIs(t, os.WriteFile(filepath.Join(s.mnt, longest+"n"), nil, 0600), syscall.ENAMETOOLONG)

	// 40 names of 255 bytes are far more than PATH_MAX.
	dir, err := unix.Open(s.mnt, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	deep := strings.Repeat("d", 255)
	for range 40 {
		require.NoError(t, unix.Mkdirat(dir, deep, 0755))
		next, err := unix.Openat(dir, deep, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Close(dir))
		dir = next
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, "f", unix.O_CREAT|unix.O_RDWR, 0600)
	require.NoError(t, err)
	_, err = unix.Write(fd, []byte("deep"))
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))
	require.NoError(t, unix.Renameat(dir, "f", dir, "g"))
	require.NoError(t, unix.Fchmodat(dir, "g", 0644, 0))
	require.NoError(t, unix.Symlinkat("target", dir, "l"))
	require.NoError(t, unix.Linkat(dir, "g", dir, "h", 0))
	var st unix.Stat_t
	require.NoError(t, unix.Fstatat(dir, "h", &st, 0))
	assert.EqualValues(t, 2, st.Nlink)
	assert.EqualValues(t, 4, st.Size)
}

func TestSpecialFiles(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	at := func(name string) string { return filepath.Join(s.mnt, name) }
	require.NoError(t, unix.Mkfifo(at("fifo"), 0600))
	require.NoError(t, unix.Mknod(at("null"), unix.S_IFCHR|0666, int(unix.Mkdev(1, 3))))
	require.NoError(t, unix.Mknod(at("block"), unix.S_IFBLK|0600, int(unix.Mkdev(700, 70000))))
	require.NoError(t, unix.Mknod(at("plain"), unix.S_IFREG|0600, 0))
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: at("socket")}))
	require.NoError(t, unix.Listen(fd, 1))
	peer, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(peer)
	assert.NoError(t, unix.Connect(peer, &unix.SockaddrUnix{Name: at("socket")}))

	for _, name := range []string{"fifo", "null", "block", "plain", "socket"} {
		var mine, home unix.Stat_t
		require.NoError(t, unix.Lstat(at(name), &mine))
		require.NoError(t, unix.Lstat(filepath.Join(s.source, name), &home))
		assert.Equal(t, home.Mode, mine.Mode, name)
		assert.Equal(t, home.Rdev, mine.Rdev, name)
		assert.Equal(t, home.Ino, mine.Ino, name)
	}
	assert.Equal(t, "through\n", sh(t, s.mnt, "echo through > fifo & cat fifo; wait; echo gone > null; cat null"))
}

func TestExecute(t *testing.T) {
	s := mount(t)
	sh(t, s.mnt, "cp /bin/true program; chmod 755 program; ./program; printf '#!/bin/sh\\necho run\\n' > script; chmod +x script")
	assert.Equal(t, "run\n", sh(t, s.mnt, "./script"))
	// A running program cannot be written.
	assert.Equal(t, "busy\n", sh(t, s.mnt,
		"cp /bin/sleep sleep; ./sleep 60 & p=$!; while [ \"$(readlink /proc/$p/exe)\" != \"$PWD/sleep\" ]; do :; done; "+
			"(: >> sleep) 2>/dev/null || echo busy; kill $p; wait $p || :"))
}

func TestHolesAndAllocation(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		f, err := os.Create(filepath.Join(s.mnt, "f"))
		require.NoError(t, err)
		defer f.Close()
		fd := int(f.Fd())
		_, err = f.WriteAt([]byte("data"), 1<<20)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		off, err := unix.Seek(fd, 0, unix.SEEK_DATA)
		require.NoError(t, err)
		assert.EqualValues(t, 1<<20, off)
		off, err = unix.Seek(fd, 0, unix.SEEK_HOLE)
		require.NoError(t, err)
		assert.EqualValues(t, 0, off)
		_, err = unix.Seek(fd, 2<<20, unix.SEEK_DATA)
		assert.Equal(t, unix.ENXIO, err)

		require.NoError(t, unix.Fallocate(fd, 0, 0, 64<<10))
		require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 4<<20, 4096))
		require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1<<20, 2))
		require.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, 1<<20+3, 1))
		got := make([]byte, 4)
		_, err = f.ReadAt(got, 1<<20)
		require.NoError(t, err)
		assert.Equal(t, "\x00\x00t\x00", string(got))
		st, err := f.Stat()
		require.NoError(t, err)
		assert.EqualValues(t, 1<<20+4, st.Size())

		g, err := os.Create(filepath.Join(s.mnt, "g"))
		require.NoError(t, err)
		defer g.Close()
		from, to := int64(1<<20), int64(100)
		n, err := unix.CopyFileRange(fd, &from, int(g.Fd()), &to, 4, 0)
		require.NoError(t, err)
		assert.Equal(t, 4, n)
		copied, err := os.ReadFile(filepath.Join(s.mnt, "g"))
		require.NoError(t, err)
		assert.Equal(t, append(make([]byte, 100), "\x00\x00t\x00"...), copied)
	})
}

func TestExtendedAttributes(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, nil, 0644))
	require.NoError(t, os.Symlink("f", filepath.Join(s.mnt, "link")))
	require.NoError(t, unix.Setxattr(path, "user.one", []byte("1"), unix.XATTR_CREATE))
	assert.Equal(t, unix.EEXIST, unix.Setxattr(path, "user.one", []byte("2"), unix.XATTR_CREATE))
	require.NoError(t, unix.Setxattr(path, "trusted.two", nil, 0))
	require.NoError(t, unix.Lsetxattr(filepath.Join(s.mnt, "link"), "trusted.link", []byte("L"), 0))
	buf := make([]byte, 200)
	n, err := unix.Lgetxattr(filepath.Join(s.source, "link"), "trusted.link", buf)
	require.NoError(t, err)
	assert.Equal(t, "L", string(buf[:n]))
	n, err = unix.Listxattr(path, buf)
	require.NoError(t, err)
	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	assert.ElementsMatch(t, []string{"user.one", "trusted.two"}, names)
	_, err = unix.Listxattr(path, buf[:3])
	assert.Equal(t, unix.ERANGE, err)
	_, err = unix.Getxattr(path, "user.none", buf)
	assert.Equal(t, unix.ENODATA, err)
	require.NoError(t, unix.Removexattr(path, "user.one"))
	assert.Equal(t, unix.ENODATA, unix.Removexattr(path, "user.one"))
	assert.Empty(t, run(t, user(program("list attributes", path), 1000, 1000)))
}

func init() {
	programs["list attributes"] = func(args []string) error {
		buf := make([]byte, 1000)
		n, err := unix.Listxattr(args[0], buf)
		os.Stdout.Write(buf[:max(n, 0)])
		return err
	}
}

func TestForeignIoctlsAreRefused(t *testing.T) {
	s := mount(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0600))
	const (
		fitrim   = 0xc0185879
		shutdown = 0x8004587d
		clone    = 0x40049409
		freeze   = 0xc0045877
	)
	for _, name := range []string{"f", "."} {
		f, err := os.Open(filepath.Join(s.mnt, name))
		require.NoError(t, err)
		for _, request := range []uint{fitrim, shutdown, freeze, IoctlGrant, 0x5501} {
			arg := make([]byte, 256)
			err := ioctl(f, request, arg)
			assert.Contains(t, []error{unix.ENOTTY, unix.EOPNOTSUPP, unix.EINVAL, unix.EPERM}, err, "%s %#x", name,
				request)
		}
		flags := make([]byte, 8)
		assert.NoError(t, ioctl(f, unix.FS_IOC_GETFLAGS, flags))
		require.NoError(t, f.Close())
	}
	require.NoError(t, os.WriteFile(path, []byte("still alive"), 0600))
}

// TestSeekDataSeesWhatWasJustWritten looks for data that the kernel may not have sent yet.
func TestSeekDataSeesWhatWasJustWritten(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		f, err := os.Create(filepath.Join(s.mnt, "f"))
		require.NoError(t, err)
		defer f.Close()
		const at, size = 1 << 20, 100_000
		_, err = f.WriteAt(bytes.Repeat([]byte{1}, size), at)
		require.NoError(t, err)
		end, err := unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
		require.NoError(t, err)
		assert.GreaterOrEqual(t, end, int64(at+size))
		start, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
		require.NoError(t, err)
		assert.LessOrEqual(t, start, int64(at))
		_, err = unix.Seek(int(f.Fd()), at+size, unix.SEEK_DATA)
		assert.ErrorIs(t, err, unix.ENXIO)
		_, err = f.WriteAt([]byte{1}, 2*at)
		require.NoError(t, err)
		start, err = unix.Seek(int(f.Fd()), 2*at, unix.SEEK_DATA)
		require.NoError(t, err)
		assert.EqualValues(t, 2*at, start)
	})
}
