package fs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// mountUnseen mounts a directory whose files the kernel opens. Changes in SOURCE must come from other processes: the
// daemon's own are not reported.
func mountUnseen(t *testing.T, change ...func(*Options)) *scene {
	t.Helper()
	requireRoot(t)
	return mount(t, append([]func(*Options){unseenOpens}, change...)...)
}

// nodeOf returns the kernel's number of a file of the mount.
func (s *scene) nodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	rest, err := filepath.Rel(s.mnt, path)
	require.NoError(t, err)
	var st unix.Statx_t
	require.NoError(t, statx(unix.AT_FDCWD, filepath.Join(s.source, rest), &st))
	n := s.fs.table.find(identify(&st))
	require.NotNil(t, n)
	return uint64(n.id)
}

// idle makes the daemon close what it has open.
func (s *scene) idle() {
	for range 2 {
		s.fs.kept.closeIdle()
	}
	for s.fs.descriptors.shed() {
	}
}

func TestUnseenOpensSendNoRequest(t *testing.T) {
	s := mountUnseen(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("first"), 0644))
	s.shows(t, "f", "first")
	require.NoError(t, os.WriteFile(path, []byte("new"), 0644)) // shorter
	s.shows(t, "f", "new")
	home, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	require.Equal(t, "new", string(home))
	for i := range 10 {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = fmt.Fprint(f, i)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		require.NoError(t, f.Close())
	}
	s.shows(t, "f", "new0123456789")
	s.lists(t, "", "f")
	require.NoError(t, os.Rename(path, path+"2"))
	s.lists(t, "", "f2")
	s.shows(t, "f2", "new0123456789")
	assert.Zero(t, s.fs.lastHandle.Load())
	require.Eventually(t, func() bool { return s.fs.kept.count() == 0 }, eventually, tick, "opens stay for ever")
}

// TestUnseenOpenOutlivesPermissions: what an open may do is decided once.
func TestUnseenOpenOutlivesPermissions(t *testing.T) {
	s := mountUnseen(t)
	path := filepath.Join(s.mnt, "f")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0444)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Chmod(path, 0))
	s.idle()
	_, err = f.WriteAt([]byte("abc"), 0)
	require.NoError(t, err)
	read, err := os.Open(path)
	require.NoError(t, err)
	defer read.Close()
	_, err = read.Write([]byte("x"))
	require.ErrorIs(t, err, unix.EBADF)
	require.ErrorIs(t, unix.Fallocate(int(read.Fd()), 0, 0, 10), unix.EBADF)
	require.ErrorIs(t, unix.Ftruncate(int(read.Fd()), 0), unix.EINVAL)
	require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 0, 10))
	n, err := unix.CopyFileRange(int(read.Fd()), new(int64), int(f.Fd()), ptr(int64(5)), 3, 0)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	s.shows(t, "f", "abc\x00\x00abc\x00\x00")
}

func ptr[T any](v T) *T { return &v }

// TestUnseenOpensOfRemovedFiles: a file that loses its name through the mount is usable until it is closed. Then its
// space comes back.
func TestUnseenOpensOfRemovedFiles(t *testing.T) {
	for _, how := range []string{"removed", "replaced", "without a name"} {
		t.Run(how, func(t *testing.T) {
			s := mountUnseen(t)
			path := filepath.Join(s.mnt, "f")
			flags := unix.O_RDWR | unix.O_CREAT
			if how == "without a name" {
				path, flags = s.mnt, unix.O_RDWR|unix.O_TMPFILE
			}
			f, err := os.OpenFile(path, flags, 0644)
			require.NoError(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("before"), 0)
			require.NoError(t, err)
			switch how {
			case "removed":
				require.NoError(t, os.Remove(path))
			case "replaced":
				require.NoError(t, os.WriteFile(path+"2", []byte("other"), 0644))
				require.NoError(t, os.Rename(path+"2", path))
			}
			for i := range maxRemoved + 10 { // not even if there are many
				name := filepath.Join(s.mnt, fmt.Sprint("g", i))
				require.NoError(t, os.WriteFile(name, nil, 0644))
				require.NoError(t, os.Remove(name))
			}
			s.idle()
			s.fs.letGoRemoved()
			nodes, _ := s.fs.descriptors.some(0, reapAtOnce)
			for _, n := range nodes {
				s.fs.letGo(n, false)
			}
			_, err = f.WriteAt([]byte("after"), 2)
			require.NoError(t, err)
			s.idle()
			require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
			got := make([]byte, 10)
			n, _ := f.ReadAt(got, 0)
			require.Equal(t, "beafter", string(got[:n]))
			m, end := s.maps(t, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()), 4096)
			require.NoError(t, f.Close())
			m.do("close", 0, 0)
			m.do("store", 0, 'B')
			s.idle()
			m.do("msync", 0, 0)
			require.EqualValues(t, 'B', m.do("load", 0, 0))
			end()
			require.Eventually(t, func() bool { return s.fs.unlinked.Load() == 0 }, eventually, tick)
			require.Empty(t, descriptorsDeleted(t, s.source), "space stays taken")
		})
	}
}

// descriptorsDeleted lists this process's descriptors of removed files below dir.
func descriptorsDeleted(t *testing.T, dir string) (found []string) {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		target, _ := os.Readlink("/proc/self/fd/" + e.Name())
		if strings.HasPrefix(target, dir) && strings.HasSuffix(target, "(deleted)") {
			found = append(found, target)
		}
	}
	return found
}

func TestUnseenFileGetsANameLater(t *testing.T) {
	s := mountUnseen(t)
	f, err := os.OpenFile(s.mnt, unix.O_RDWR|unix.O_TMPFILE, 0644)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("text")
	require.NoError(t, err)
	name := filepath.Join(s.mnt, "named")
	require.NoError(t, unix.Linkat(unix.AT_FDCWD, procPath(int(f.Fd())), unix.AT_FDCWD, name, unix.AT_SYMLINK_FOLLOW))
	s.idle()
	_, err = f.WriteString(" more")
	require.NoError(t, err)
	s.shows(t, "named", "text more")
	require.NoError(t, os.Remove(name))
	s.idle()
	_, err = f.WriteAt([]byte("T"), 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { return s.fs.unlinked.Load() == 0 }, eventually, tick)
}

// TestUnseenOpensOfFilesMovedInSource: writes and stores of programs reach a file that got another name in SOURCE.
func TestUnseenOpensOfFilesMovedInSource(t *testing.T) {
	s := mountUnseen(t, withFiles(t, map[string]string{"f": "0123456789", "dir/g": "abcdefghij"}))
	for _, name := range []string{"f", "dir/g"} {
		m, _ := s.maps(t, filepath.Join(s.mnt, name), 4096)
		m.do("store", 1, 'M') // dirty
		sh(t, s.source, "mkdir -p out; mv "+name+" out/moved; rmdir dir 2>/dev/null || true")
		require.Eventually(t, func() bool { s.idle(); return s.fs.kept.count() == 0 }, eventually, tick)
		m.do("write", 0, 'W')
		m.do("store", 2, 'N')
		m.do("sync", 0, 0)
		m.do("stat", 0, 0)
		home, err := os.ReadFile(filepath.Join(s.source, "out/moved"))
		require.NoError(t, err)
		require.Equal(t, "WMN", string(home[:3]))
		require.Len(t, home, 10)
		s.shows(t, "out/moved", string(home))
	}
}

// TestUnseenOpensOnReadOnlyMountBelow: what a mount below SOURCE forbids stays forbidden, also if it shows SOURCE's own
// filesystem, and if the file was used before by another name.
func TestUnseenOpensOnReadOnlyMountBelow(t *testing.T) {
	s := mountUnseen(t, withFiles(t, map[string]string{"../other/f": "text", "used": "text", "at/x": ""}))
	other, at := filepath.Join(s.source, "../other"), filepath.Join(s.source, "at")
	require.NoError(t, os.Link(filepath.Join(s.source, "used"), filepath.Join(other, "used")))
	require.NoError(t, os.WriteFile(filepath.Join(s.mnt, "used"), []byte("text"), 0644))
	require.NoError(t, unix.Mount(other, at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(at, unix.MNT_DETACH)) })
	require.NoError(t, unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(s.mnt, "at/f"))
		return err == nil
	}, eventually, tick)
	for _, name := range []string{"f", "used"} {
		f, err := os.OpenFile(filepath.Join(s.mnt, "at", name), os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte("X"), 0)
		assert.ErrorIs(t, err, unix.EROFS, name)
		got := make([]byte, 9)
		n, _ := f.ReadAt(got, 0)
		assert.Equal(t, "text", string(got[:n]))
		require.NoError(t, f.Close())
		s.idle()
	}
}

// TestUnseenFileRemovedInSourceIsLetGo: the space of a file that another process removed comes back when programs have
// closed it, also after a grant for it.
func TestUnseenFileRemovedInSourceIsLetGo(t *testing.T) {
	for name, kernel := range map[string]func(*Options){"": func(*Options) {}, "older kernel": olderKernel} {
		t.Run(name, func(t *testing.T) { removedInSource(t, kernel) })
	}
}

func removedInSource(t *testing.T, kernel func(*Options)) {
	s, cache, n := mountWithDevices(t, 1, unseenOpens, kernel)
	f, err := os.Create(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.Write(make([]byte, 1<<20))
	require.NoError(t, err)
	w := mapOn(t, cache, n, f, 0, 1<<20)
	w.store(t, 0, []byte("gpu"))
	w.release(t, 1<<20)
	w.close(t)
	require.NoError(t, f.Close())
	sh(t, s.source, "rm f")
	require.Eventually(t, func() bool { return len(descriptorsDeleted(t, s.source)) == 0 }, eventually, tick, "space")
	require.Eventually(t, func() bool { return n.devices[0].Used() == 0 }, eventually, tick, "device memory")
}

// TestUnseenOpensSeeChangesInSource: other processes change SOURCE while programs on the mount have the file open and
// write it.
func TestUnseenOpensSeeChangesInSource(t *testing.T) {
	s := mountUnseen(t, withFiles(t, map[string]string{"f": strings.Repeat("-", 3*4096), "gone": "x"}))
	f, err := os.Open(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	defer f.Close()
	m, _ := s.maps(t, filepath.Join(s.mnt, "f"), 3*4096)
	for i := range 20 {
		mark := byte('a' + i)
		m.do("store", 8192, mark)
		m.do("write", 4096, mark)
		sh(t, s.source, fmt.Sprintf(`printf %%s "%c" | dd of=f bs=1 seek=%d conv=notrunc status=none`, mark, 5))
		require.Eventually(t, func() bool { return m.do("read", 5, 0) == mark && m.do("load", 5, 0) == mark }, eventually,
			tick)
		require.Equal(t, mark, m.do("load", 4096, 0))
		require.Equal(t, mark, m.do("load", 8192, 0))
	}
	sh(t, s.source, "echo more >> f; rm gone; echo new > new")
	s.lists(t, "", "f", "new")
	require.Eventually(t, func() bool {
		st, err := f.Stat()
		return err == nil && st.Size() == 3*4096+5
	}, eventually, tick)
	sh(t, s.source, "echo other > g; mv g f")
	s.shows(t, "f", "other\n")
}

// TestUnseenTruncatingOpen: O_TRUNC moves mtime, also of an empty file.
func TestUnseenTruncatingOpen(t *testing.T) {
	everyTruncation := func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		for _, text := range []string{"", "text"} {
			require.NoError(t, os.WriteFile(path, []byte(text), 0644))
			past := time.Unix(1e9, 0)
			require.NoError(t, os.Chtimes(path, past, past))
			f, err := os.OpenFile(path, os.O_RDWR|os.O_TRUNC, 0)
			require.NoError(t, err)
			st, err := f.Stat()
			require.NoError(t, err)
			require.Zero(t, st.Size())
			require.True(t, st.ModTime().After(past), "%q", text)
			require.NoError(t, os.Chtimes(path, past, past))
			require.NoError(t, f.Truncate(0))
			st, err = f.Stat()
			require.NoError(t, err)
			require.True(t, st.ModTime().After(past), "ftruncate after %q", text)
			require.NoError(t, f.Close())
		}
	}
	bothModes(t, everyTruncation)
	unseenModes(t, everyTruncation)
}

// TestUnseenAppendOnlyFile: a file that allows only appending gets no other writes.
func TestUnseenAppendOnlyFile(t *testing.T) {
	s := mountUnseen(t, withFiles(t, map[string]string{"f": "text"}))
	const appendOnly = 0x20
	if err := changeFlags(filepath.Join(s.source, "f"), appendOnly, 0); err != nil {
		t.Skip("no append-only files here: ", err)
	}
	defer func() { require.NoError(t, changeFlags(filepath.Join(s.source, "f"), 0, appendOnly)) }()
	f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_RDWR, 0)
	if err == nil { // the kernel does not know the flag
		_, err = f.WriteAt([]byte("x"), 0)
		f.Close()
	}
	require.ErrorIs(t, err, unix.EPERM)
	f, err = os.OpenFile(filepath.Join(s.mnt, "f"), os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString(" more")
	require.NoError(t, err)
	home, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	require.Equal(t, "text more", string(home))
}

// TestUnseenStoresGetNoReserve: stores by mmap count as the owner's, and as nobody's if the file is root's and others
// may write it.
func TestUnseenStoresGetNoReserve(t *testing.T) {
	s := mountUnseen(t)
	f, err := os.Create(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	defer f.Close()
	of := &openFile{fd: int(f.Fd())}
	for mode, user := range map[os.FileMode]uint32{0644: 0, 0664: nobody, 0646: nobody} {
		require.NoError(t, f.Chmod(mode))
		require.Equal(t, user, s.fs.storer(of), "%o", mode)
	}
	require.NoError(t, f.Chown(4242, 4242))
	require.EqualValues(t, 4242, s.fs.storer(of))
}

// TestUnseenCreatorsOpenServesAll: what a creator may do with its descriptor does not bind others.
func TestUnseenCreatorsOpenServesAll(t *testing.T) {
	s := mountUnseen(t)
	for name, access := range map[string]int{"read": os.O_RDONLY, "write": os.O_WRONLY} {
		path := filepath.Join(s.mnt, name)
		f, err := os.OpenFile(path, access|os.O_CREATE|os.O_EXCL, 0644)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, []byte("text"), 0644))
		require.NoError(t, os.WriteFile(path, []byte("new"), 0644))
		s.shows(t, name, "new")
		require.NoError(t, f.Close())
	}
}

// TestUnseenFlagsCountAtOnce: a file that became append-only through the mount is not overwritten through an open of
// the daemon's from before.
func TestUnseenFlagsCountAtOnce(t *testing.T) {
	s := mountUnseen(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("text"), 0644))
	const appendOnly = 0x20
	if err := changeFlags(path, appendOnly, 0); err != nil {
		t.Skip("no append-only files here: ", err)
	}
	defer func() { require.NoError(t, changeFlags(path, 0, appendOnly)) }()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil { // the kernel does not know the flag
		_, err = f.WriteAt([]byte("x"), 0)
		require.NoError(t, f.Close())
	}
	require.ErrorIs(t, err, unix.EPERM)
}

// TestHandleOfAnotherFile: a handle that leads to another file than the node's is given up.
func TestHandleOfAnotherFile(t *testing.T) {
	s := mountUnseen(t, withFiles(t, map[string]string{"f": "f", "g": "g"}))
	s.shows(t, "f", "f")
	s.shows(t, "g", "g")
	s.idle()
	f, g := s.fs.node(s.nodeOf(t, filepath.Join(s.mnt, "f"))), s.fs.node(s.nodeOf(t, filepath.Join(s.mnt, "g")))
	f.handle.Store(g.handle.Load())
	_, errno := s.fs.openHandle(f, unix.O_RDWR)
	require.Equal(t, unix.ESTALE, errno)
	require.Nil(t, f.handle.Load())
	require.NotNil(t, g.handle.Load())
}

// TestUnseenOpensNeedEvents: without events the mount is refused, and the error says why.
func TestUnseenOpensNeedEvents(t *testing.T) {
	requireRoot(t)
	below := mount(t)
	mnt := t.TempDir()
	s, err := Mount(Options{Source: below.mnt, Mountpoint: mnt, KernelOpens: true})
	if err == nil {
		defer func() { require.NoError(t, s.Unmount()) }()
	}
	var none *NoEvents
	require.ErrorAs(t, err, &none)
	require.Error(t, errors.Unwrap(none))
	require.Contains(t, err.Error(), "read-only")
}

// show asks for a grant through f and shows the descriptor number.
func show(f *os.File, number int) error {
	request := make([]byte, GrantSize)
	binary.LittleEndian.PutUint32(request, uint32(int32(number)))
	err := ioctl(f, IoctlGrantShown, request)
	if err == nil && !bytes.Equal(request[:4], []byte("gaia")) {
		return errors.New("no grant")
	}
	return err
}

func TestShownDescriptors(t *testing.T) {
	n := &notary{socket: "/s"}
	s := mountUnseen(t, func(o *Options) { o.Granter = n }, withFiles(t, map[string]string{"f": "f", "g": "g"}))
	open := func(path string, flags int) *os.File {
		t.Helper()
		f, err := os.OpenFile(path, flags, 0)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	path := filepath.Join(s.mnt, "f")
	read, write, both := open(path, os.O_RDONLY), open(path, os.O_WRONLY), open(path, os.O_RDWR)
	assert.ErrorIs(t, ioctl(read, IoctlGrant, make([]byte, GrantSize)), unix.EBADFD)
	assert.ErrorIs(t, show(read, -1), unix.EBADFD)
	for _, c := range []struct {
		f             *os.File
		reads, writes bool
	}{{read, true, false}, {write, false, true}, {both, true, true}} {
		require.NoError(t, show(c.f, int(c.f.Fd())))
		assert.Equal(t, c.reads, n.last().Readable())
		assert.Equal(t, c.writes, n.last().Writable())
		assert.True(t, n.last().Open())
	}
	// The request says nothing: only the descriptor that is shown counts.
	require.NoError(t, show(both, int(read.Fd())))
	assert.False(t, n.last().Writable())

	bare := open(path, unix.O_PATH)
	other := open(filepath.Join(s.mnt, "g"), os.O_RDWR)
	source := open(filepath.Join(s.source, "f"), os.O_RDWR) // of the same inode number
	for what, number := range map[string]int{"O_PATH": int(bare.Fd()), "another file": int(other.Fd()),
		"SOURCE": int(source.Fd()), "none": 1 << 20} {
		assert.ErrorIs(t, show(read, number), unix.EBADF, what)
	}
	file := s.fs.table.byInode(s.fs.root.key)
	require.NotNil(t, file)
	_, errno := s.fs.accessShown(file, &fuse.Caller{}, int32(read.Fd()))
	assert.Equal(t, unix.ESRCH, errno, "a process that cannot be seen")
	_, errno = s.fs.accessShown(file, &fuse.Caller{Pid: 1 << 30}, int32(read.Fd()))
	assert.Equal(t, unix.ESRCH, errno, "a process that is gone")
}

func init() {
	// shower opens args[0] with the flags args[1], asks through that for a grant, and shows what args[2] opens with the
	// flags args[3].
	programs["shower"] = func(args []string) error {
		var files [2]*os.File
		for i := range files {
			flags, err := strconv.Atoi(args[2*i+1])
			if err != nil {
				return err
			}
			if files[i], err = os.OpenFile(args[2*i], flags, 0); err != nil {
				return err
			}
		}
		if errno, ok := show(files[0], int(files[1].Fd())).(syscall.Errno); ok {
			fmt.Print(int(errno))
		} else {
			fmt.Print(0)
		}
		return nil
	}
}

// shown runs shower as a user and returns the errno.
func (s *scene) shown(t *testing.T, uid uint32, asks string, flags int, shows string, its int,
	change ...func(*exec.Cmd)) unix.Errno {
	t.Helper()
	cmd := user(program("shower", asks, fmt.Sprint(flags), shows, fmt.Sprint(its)), uid, uid)
	for _, c := range change {
		c(cmd)
	}
	errno, err := strconv.Atoi(run(t, cmd))
	require.NoError(t, err)
	return unix.Errno(errno)
}

// TestShownDescriptorsOfUsers: a user gets what the user's own descriptor allows, and nothing if inode numbers may be
// ambiguous.
func TestShownDescriptorsOfUsers(t *testing.T) {
	const alice = 4242
	n := &notary{socket: "/s"}
	s := mountUnseen(t, func(o *Options) { o.Granter = n }, withFiles(t, map[string]string{"f": "f", "mine": "g"}))
	require.NoError(t, os.Chown(filepath.Join(s.source, "mine"), alice, alice))
	path, mine := filepath.Join(s.mnt, "f"), filepath.Join(s.mnt, "mine")
	require.Zero(t, s.shown(t, alice, path, os.O_RDONLY, path, os.O_RDONLY))
	assert.False(t, n.last().Writable())
	assert.True(t, n.last().Readable())
	assert.EqualValues(t, alice, n.last().(shownFile).uid)
	require.Zero(t, s.shown(t, alice, mine, os.O_RDONLY, mine, os.O_RDWR))
	assert.True(t, n.last().Writable())
	assert.Equal(t, unix.EBADF, s.shown(t, alice, path, os.O_RDONLY, mine, os.O_RDWR), "of another file")

	var st unix.Statx_t
	require.NoError(t, statx(unix.AT_FDCWD, filepath.Join(s.source, "f"), &st))
	former := identify(&st)
	current := s.fs.table.find(former)
	require.NotNil(t, current)
	former.birth.Sec--
	s.fs.table.refer(former, func(*node) {}) // as if another file had got the number of f, which is still open
	assert.Equal(t, unix.EBUSY, s.shown(t, alice, path, os.O_RDONLY, path, os.O_RDONLY))
	assert.Zero(t, s.shown(t, 0, path, os.O_RDONLY, path, os.O_RDONLY), "root needs no such tricks")

	at := filepath.Join(s.source, "below")
	require.NoError(t, os.Mkdir(at, 0755))
	require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1M,mode=755"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(at, unix.MNT_DETACH)) })
	require.NoError(t, os.WriteFile(filepath.Join(at, "f"), nil, 0644))
	path = filepath.Join(s.mnt, "below/f")
	assert.Equal(t, unix.EXDEV, s.shown(t, alice, path, os.O_RDONLY, path, os.O_RDONLY), "numbers that were mixed")
	assert.Zero(t, s.shown(t, 0, path, os.O_RDONLY, path, os.O_RDONLY), "root")
}

// writers counts the grants that allow writing.
type writers struct {
	*notary
	all, writable atomic.Int32
}

func (w *writers) Grant(src pagecache.Source, uid uint32) (Grant, error) {
	w.all.Add(1)
	if src.Writable() {
		w.writable.Add(1)
	}
	return w.notary.Grant(src, uid)
}

func init() {
	// "swapper" asks for grants for args[0] and shows a descriptor that another thread makes one for reading args[0],
	// and one for reading and writing args[1], in turn.
	programs["swapper"] = func(args []string) error {
		read, err := os.Open(args[0])
		if err != nil {
			return err
		}
		both, err := os.OpenFile(args[1], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		const number = 100
		var stop atomic.Bool
		done := make(chan error)
		go func() {
			for !stop.Load() {
				for _, f := range []*os.File{read, both} {
					if err := unix.Dup3(int(f.Fd()), number, unix.O_CLOEXEC); err != nil && err != unix.EBUSY {
						done <- err
						return
					}
				}
			}
			done <- nil
		}()
		for range 5000 {
			_ = show(read, number)
		}
		stop.Store(true)
		return <-done
	}
}

// TestShownDescriptorsThatChange: a descriptor of a file elsewhere that has the same number gives no rights, not even
// while it takes the place of one that gives some.
func TestShownDescriptorsThatChange(t *testing.T) {
	w := &writers{notary: &notary{socket: "/s"}}
	s := mountUnseen(t, func(o *Options) { o.Granter = w }, withFiles(t, map[string]string{"f": "f"}))
	path := filepath.Join(s.mnt, "f")
	run(t, program("swapper", path, filepath.Join(s.source, "f")))
	require.NotZero(t, w.all.Load())
	require.Zero(t, w.writable.Load())
	run(t, program("swapper", path, path))
	require.NotZero(t, w.writable.Load(), "of the mount")
}

// TestShownDescriptorInANamespace: descriptors of other mounts of the mount count, and processes in PID namespaces
// below the daemon's are seen.
func TestShownDescriptorInANamespace(t *testing.T) {
	n := &notary{socket: "/s"}
	s := mountUnseen(t, func(o *Options) { o.Granter = n }, withFiles(t, map[string]string{"f": "f"}))
	bound := t.TempDir()
	require.NoError(t, unix.Mount(s.mnt, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(bound, unix.MNT_DETACH)) })
	path := filepath.Join(bound, "f")
	require.Zero(t, s.shown(t, 0, path, os.O_RDONLY, path, os.O_RDWR, func(c *exec.Cmd) {
		c.SysProcAttr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS
	}))
	assert.True(t, n.last().Writable())
}

func init() {
	// "own proc" looks for descriptor 0 of process args[0].
	programs["own proc"] = func(args []string) error {
		process, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		_, errno := new(fileSystem).lookShown(&fuse.Caller{Pid: uint32(process)}, 0)
		fmt.Print(int(errno))
		return nil
	}
}

// TestShownDescriptorsNeedOwnProc: a daemon whose /proc is of another PID namespace does not take another process for
// the one that asks.
func TestShownDescriptorsNeedOwnProc(t *testing.T) {
	requireRoot(t)
	require.True(t, ownProc())
	cmd := program("own proc", fmt.Sprint(os.Getpid()))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	require.Equal(t, fmt.Sprint(int(unix.ESRCH)), run(t, cmd))
}

func TestParseShown(t *testing.T) {
	open, ok := parseShown("pos:\t0\nflags:\t0100002\nmnt_id:\t29\nino:\t17\nlock:\t1: FLOCK\n")
	require.True(t, ok)
	require.Equal(t, shownOpen{0100002, 29, 17}, open)
	for _, text := range []string{"", "flags:\t09\nmnt_id:\t1\nino:\t1\n", "flags:\t02\nmnt_id:\t1\n",
		"flags:\t02\nflags:\t02\nmnt_id:\t1\nino:\t1\n", "flags:\t\nmnt_id:\t1\nino:\t1\n"} {
		_, ok := parseShown(text)
		require.False(t, ok, "%q", text)
	}
}
