package fs

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// mountThrough mounts with passthrough. It skips the test if passthrough is not available.
func mountThrough(t *testing.T, change ...func(*Options)) *scene {
	t.Helper()
	s := mount(t, append(change, passThrough)...)
	if !s.Passthrough() {
		t.Skip("passthrough needs root and Linux 6.9")
	}
	return s
}

// opens returns how many opens of a file the daemon counts, by mode.
func opens(t *testing.T, s *scene, path string) (through, others int) {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	n := s.fs.table.byInode(inodeKey{s.fs.root.key.dev, st.Ino})
	if n == nil || n.data.Load() == nil {
		return 0, 0
	}
	p := &n.content().through
	p.mu.Lock()
	defer p.mu.Unlock()
	assert.Equal(t, p.through > 0, p.number != 0)
	return p.through, p.others
}

func TestPassthroughNeedsNoRequests(t *testing.T) {
	s := mountThrough(t, writeBack, func(o *Options) { o.AttrTimeout = time.Hour })
	assert.False(t, s.fs.writeBack, "the kernel does not do both")
	path := filepath.Join(s.mnt, "f")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	through, others := opens(t, s, path)
	assert.Equal(t, []int{1, 0}, []int{through, others})
	want := bytes.Repeat([]byte("abc"), 100_000)
	_, err = f.Write(want)
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	assert.Equal(t, want, got, "a write is in SOURCE when it returns")
	st, err := f.Stat()
	require.NoError(t, err)
	assert.EqualValues(t, len(want), st.Size())

	g, err := os.Open(path)
	require.NoError(t, err)
	defer g.Close()
	through, _ = opens(t, s, path)
	assert.Equal(t, 2, through)
	got = make([]byte, len(want))
	_, err = g.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, want, got)
	// A change in SOURCE is seen at once.
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), []byte("underneath"), 0))
	n, err := g.ReadAt(got, 0)
	assert.Equal(t, "underneath", string(got[:n]), "%v", err)

	for _, of := range s.fs.files.all() {
		assert.False(t, of.content.filled.Load(), "the daemon was asked to read")
	}
	require.NoError(t, f.Close())
	require.NoError(t, g.Close())
	require.Eventually(t, func() bool { through, _ := opens(t, s, path); return through == 0 }, eventually, tick)
	assert.Zero(t, s.fs.changed.Load())
}

func init() {
	// "slot" opens, writes, reads and maps the file args[0] repeatedly, each time in another way, in a page of its own.
	programs["slot"] = func(args []string) error {
		slot, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		at := int64(slot) * page.Size
		for i := uint64(1); i <= 300; i++ {
			word := binary.NativeEndian.AppendUint64(nil, i)
			f, err := os.OpenFile(args[0], os.O_RDWR, 0)
			if err != nil {
				return fmt.Errorf("open %d: %w", i, err)
			}
			if i%3 == 0 {
				m, err := unix.Mmap(int(f.Fd()), at, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				if err != nil {
					return fmt.Errorf("mmap %d: %w", i, err)
				}
				copy(m, word)
				if err := unix.Munmap(m); err != nil {
					return err
				}
			} else if _, err := f.WriteAt(word, at); err != nil {
				return fmt.Errorf("write %d: %w", i, err)
			}
			if i%2 == 0 {
				if err := f.Close(); err != nil {
					return err
				}
			}
			g, err := os.Open(args[0])
			if err != nil {
				return fmt.Errorf("open %d for reading: %w", i, err)
			}
			var got [8]byte
			if _, err := g.ReadAt(got[:], at); err != nil {
				return err
			}
			if !bytes.Equal(got[:], word) {
				return fmt.Errorf("read %d after writing %d", binary.NativeEndian.Uint64(got[:]), i)
			}
			g.Close()
			f.Close()
		}
		return nil
	}
}

// TestModesChangeUnderPrograms makes programs keep opening, writing and mapping one file, while files alternately pass
// through or not. An open gets the mode of the file's other opens. No program gets an error or old bytes.
func TestModesChangeUnderPrograms(t *testing.T) {
	s := mountThrough(t)
	for round, kept := range []bool{true, false} {
		path := filepath.Join(s.mnt, fmt.Sprint("f", round))
		require.NoError(t, os.WriteFile(path, make([]byte, 4*page.Size), 0600))
		if kept {
			f, err := os.Open(path) // keeps the file in its first mode
			require.NoError(t, err)
			defer f.Close()
		}
		ended := make(chan error)
		for slot := range 4 {
			go func() {
				out, err := program("slot", path, strconv.Itoa(slot)).CombinedOutput()
				if err != nil {
					err = fmt.Errorf("program %d: %w: %s", slot, err, out)
				}
				ended <- err
			}()
		}
		for left := 4; left > 0; {
			select {
			case err := <-ended:
				assert.NoError(t, err)
				left--
			case <-time.After(tick):
				s.fs.passes.Store(!s.fs.passes.Load())
			}
		}
		s.fs.passes.Store(true)
		got, err := os.ReadFile(filepath.Join(s.source, fmt.Sprint("f", round)))
		require.NoError(t, err)
		for slot := range 4 {
			assert.EqualValues(t, 300, binary.NativeEndian.Uint64(got[slot*page.Size:]), "slot %d", slot)
		}
	}
}

// TestPassthroughMappingOutlivesItsOpen shows why files that a device may map for writing cannot pass through: the
// daemon learns neither of the mapping nor of the stores into it, and takes the file for closed.
func TestPassthroughMappingOutlivesItsOpen(t *testing.T) {
	s := mountThrough(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, make([]byte, page.Size), 0600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := unix.Mmap(int(f.Fd()), 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(m)) }()
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { return len(s.fs.files.all()) == 0 }, eventually, tick)
	copy(m, "stored")
	got, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	assert.Equal(t, "stored", string(got[:6]))

	// So the file gets no kernel pages any more: they would lack these stores.
	s.fs.passes.Store(false)
	g, err := os.Open(path)
	require.NoError(t, err)
	defer g.Close()
	_, others := opens(t, s, path)
	assert.Equal(t, 1, others)
	for _, want := range []string{"first", "later"} {
		copy(m, want)
		var now [5]byte
		_, err = g.ReadAt(now[:], 0)
		require.NoError(t, err)
		assert.Equal(t, want, string(now[:]))
	}
}

func TestTimesOfAFileThatIsMappedInPassthrough(t *testing.T) {
	s := mountThrough(t, func(o *Options) { o.AttrTimeout = time.Hour })
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, make([]byte, page.Size), 0600))
	long := time.Now().Add(-time.Hour)
	require.NoError(t, os.Chtimes(path, long, long))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(m)) }()
	before, err := f.Stat()
	require.NoError(t, err)
	m[0] = 1
	require.NoError(t, unix.Msync(m, unix.MS_SYNC))
	after, err := os.Stat(path)
	require.NoError(t, err)
	assert.Greater(t, after.ModTime().Sub(before.ModTime()), time.Minute)
}

// TestReadOnlyMountPassesThroughBesideADevice makes a device and programs read the same files of a read-only mount.
func TestReadOnlyMountPassesThroughBesideADevice(t *testing.T) {
	s, cache, n := mountWithDevices(t, 1, passThrough, func(o *Options) { o.ReadOnly = true })
	if !s.Passthrough() {
		t.Skip("passthrough needs root and Linux 6.9")
	}
	path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
	require.NoError(t, os.WriteFile(home, []byte("0123456789"), 0644))
	f, err := os.Open(path)
	require.NoError(t, err)
	w := mapReadOnlyOn(t, cache, n, f, 0, 10)
	assert.Equal(t, "0123456789", w.load(t, 10))
	through, others := opens(t, s, path)
	assert.Equal(t, []int{1, 0}, []int{through, others}, "the open that the device's client mapped the file with")

	// Later opens of the file join. A change in SOURCE is noticed, by the device too.
	require.NoError(t, os.WriteFile(home, []byte("abcdefghij"), 0644))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "abcdefghij", string(got))
	_, err = w.Acquire(context.Background(), 0, 10, false)
	require.NoError(t, err)
	assert.Equal(t, "abcdefghij", w.load(t, 10))

	// After the last of them is closed, opens of a file that a device holds go through the daemon, which may read from
	// the device.
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { through, _ := opens(t, s, path); return through == 0 }, eventually, tick)
	f, err = os.Open(path)
	require.NoError(t, err)
	through, others = opens(t, s, path)
	assert.Equal(t, []int{0, 1}, []int{through, others})
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, "abcdefghij", string(got))
	require.NoError(t, os.WriteFile(home, []byte("ABCDEFGHIJ"), 0644))
	got, err = os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "ABCDEFGHIJ", string(got))
	require.NoError(t, f.Close())
	w.close(t)
}

// refusing is a kernel that registers no backing file.
type refusing struct {
	kernelBacking
	errno syscall.Errno
}

func (r refusing) RegisterBackingFd(*fuse.BackingMap) (int32, syscall.Errno) { return 0, r.errno }

// TestPassthroughRefused makes the kernel refuse a file, for a reason that applies to all files or to this one only.
func TestPassthroughRefused(t *testing.T) {
	for errno, all := range map[syscall.Errno]bool{
		syscall.EPERM: true, syscall.ENOTTY: true, syscall.ELOOP: true, syscall.EOPNOTSUPP: false,
		syscall.EINVAL: false,
	} {
		var log bytes.Buffer
		s := mountThrough(t, writeBack, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
		assert.False(t, s.WriteBack(), "passthrough took its place")
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(path, []byte("content"), 0600))
		require.Eventually(t, func() bool { through, _ := opens(t, s, path); return through == 0 }, eventually, tick)
		for _, n := range s.fs.table.byID.all() {
			if c := n.data.Load(); c != nil {
				c.through.mu.Lock() // the lock under which the next open asks the kernel
				s.fs.backing = refusing{s.fs.backing, errno}
				c.through.mu.Unlock()
			}
		}
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, "content", string(got))
		assert.Equal(t, !all, s.Passthrough(), errno)
		assert.EqualValues(t, 1, s.PassthroughRefused(), errno)
		assert.False(t, s.WriteBack(), "it is asked for at the beginning, or never")
		require.NoError(t, s.Unmount())
		assert.Equal(t, all, strings.Contains(log.String(), "level=WARN msg=\"the kernel lets no file"), log.String())
		assert.Equal(t, all, strings.Contains(log.String(), "write-back was given up"), log.String())
	}
}

// TestPassthroughOfAStackedFilesystem mounts a mount that has passthrough. The kernel refuses to stack it once more.
func TestPassthroughOfAStackedFilesystem(t *testing.T) {
	below := mountThrough(t)
	require.NoError(t, os.WriteFile(filepath.Join(below.source, "f"), []byte("content"), 0600))
	s := mount(t, passThrough, func(o *Options) { o.Source = below.mnt })
	got, err := os.ReadFile(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	assert.Equal(t, "content", string(got))
	assert.False(t, s.Passthrough())
	assert.EqualValues(t, 1, s.PassthroughRefused())

	// A stacked filesystem below SOURCE does not affect other files.
	s = mountThrough(t)
	sub := filepath.Join(s.source, "sub")
	require.NoError(t, os.Mkdir(sub, 0755))
	require.NoError(t, unix.Mount(below.mnt, sub, "", unix.MS_BIND, ""))
	defer func() { require.NoError(t, unix.Unmount(sub, unix.MNT_DETACH)) }()
	got, err = os.ReadFile(filepath.Join(s.mnt, "sub/f"))
	require.NoError(t, err)
	assert.Equal(t, "content", string(got))
	assert.True(t, s.Passthrough())
	assert.EqualValues(t, 1, s.PassthroughRefused())
}

// TestProgramsRunFromAMountInPassthrough: the kernel maps programs from the backing file.
func TestProgramsRunFromAMountInPassthrough(t *testing.T) {
	s := mountThrough(t)
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	path := filepath.Join(s.mnt, "program")
	require.NoError(t, os.WriteFile(path, self, 0755))
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), programVariable+"=say hello")
	assert.Equal(t, "hello", run(t, cmd))
}

func init() {
	programs["say hello"] = func([]string) error {
		_, err := os.Stdout.WriteString("hello")
		return err
	}
}

// TestReadOnlyMountThatIsMadeWritable: the superuser can turn the kernel's own check off.
func TestReadOnlyMountThatIsMadeWritable(t *testing.T) {
	requireRoot(t)
	for name, option := range map[string]func(*Options){"passthrough": passThrough, "write-through": func(*Options) {},
		"write-back": writeBack} {
		t.Run(name, func(t *testing.T) {
			s := mount(t, option, func(o *Options) { o.ReadOnly = true })
			at := func(name string) string { return filepath.Join(s.mnt, name) }
			home := func(name string) string { return filepath.Join(s.source, name) }
			require.NoError(t, os.WriteFile(home("f"), []byte("kept"), 0644))
			require.NoError(t, unix.Setxattr(home("f"), "user.kept", []byte("1"), 0))
			require.NoError(t, os.Mkdir(home("d"), 0755))
			var before, after unix.Stat_t
			require.NoError(t, unix.Stat(home("f"), &before))
			require.NoError(t, unix.Mount("", s.mnt, "", unix.MS_REMOUNT, ""))
			f, err := os.Open(at("f"))
			require.NoError(t, err)
			defer f.Close()
			d, err := os.Open(at("d"))
			require.NoError(t, err)
			defer d.Close()
			flags, xflags := make([]byte, 8), make([]byte, sizeOfXFlags)
			require.NoError(t, ioctl(f, unix.FS_IOC_GETFLAGS, flags))
			require.NoError(t, ioctl(f, ioctlReadXFlags, xflags))
			flags[0] ^= 0x80  // FS_NOATIME_FL
			xflags[0] ^= 0x40 // FS_XFLAG_NOATIME
			open := func(name string, flags int) error {
				fd, err := unix.Open(at(name), flags, 0600)
				if err == nil {
					unix.Close(fd)
				}
				return err
			}
			for what, err := range map[string]error{
				"open":          open("f", unix.O_WRONLY),
				"open to cut":   open("f", unix.O_RDONLY|unix.O_TRUNC),
				"create":        open("new", unix.O_CREAT|unix.O_WRONLY),
				"no name":       open("d", unix.O_TMPFILE|unix.O_RDWR),
				"mknod":         unix.Mknod(at("new"), unix.S_IFREG|0600, 0),
				"mkdir":         unix.Mkdir(at("new"), 0700),
				"symlink":       unix.Symlink("f", at("new")),
				"link":          unix.Link(at("f"), at("new")),
				"unlink":        unix.Unlink(at("f")),
				"rmdir":         unix.Rmdir(at("d")),
				"rename":        unix.Rename(at("f"), at("new")),
				"chmod":         unix.Chmod(at("f"), 0600),
				"chown":         unix.Chown(at("f"), 1, 1),
				"truncate":      unix.Truncate(at("f"), 1),
				"utimes":        unix.UtimesNanoAt(unix.AT_FDCWD, at("f"), make([]unix.Timespec, 2), 0),
				"setxattr":      unix.Setxattr(at("f"), "user.new", []byte("2"), 0),
				"removexattr":   unix.Removexattr(at("f"), "user.kept"),
				"chattr":        ioctl(f, unix.FS_IOC_SETFLAGS, flags),
				"chattr of dir": ioctl(d, unix.FS_IOC_SETFLAGS, flags),
				"fssetxattr":    ioctl(f, ioctlWriteXFlags, xflags),
			} {
				assert.ErrorIs(t, err, syscall.EROFS, what)
			}
			// The kernel sends these only for writable opens, and there are none.
			served := s.fs.served()
			handle := s.fs.files.all()[0].handle
			_, status := served.Write(nil, &fuse.WriteIn{Fh: handle, Size: 1}, []byte("x"))
			assert.Equal(t, fuse.EROFS, status)
			assert.Equal(t, fuse.EROFS, served.Fallocate(nil, &fuse.FallocateIn{Fh: handle, Length: 1}))
			_, status = served.CopyFileRange(nil, &fuse.CopyFileRangeIn{FhIn: handle, FhOut: handle, Len: 1})
			assert.Equal(t, fuse.EROFS, status)

			got, err := os.ReadFile(at("f"))
			require.NoError(t, err)
			assert.Equal(t, "kept", string(got))
			require.NoError(t, unix.Stat(home("f"), &after))
			assert.Equal(t, before.Ctim, after.Ctim)
			entries, err := os.ReadDir(s.source)
			require.NoError(t, err)
			assert.Len(t, entries, 2)
		})
	}
}

func TestAtLeast(t *testing.T) {
	for release, want := range map[string]bool{
		"6.9.0": true, "6.18.44-fc": true, "7.0": true, "10.1": true, "6.9": true, "6.10-rc1": true,
		"6.8.12": false, "5.15.0": false, "6": false, "": false, "x": false,
	} {
		assert.Equal(t, want, atLeast(release, 6, 9), release)
	}
}
