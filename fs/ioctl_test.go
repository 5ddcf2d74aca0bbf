package fs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// ioctl calls ioctl(2) with arg, which the kernel reads and writes.
func ioctl(f *os.File, request uint, arg []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(unsafe.Pointer(&arg[0])))
	if errno != 0 {
		return errno
	}
	return nil
}

// askGrant asks for a grant as client libraries do: it shows the descriptor if the daemon wants to see it.
func askGrant(f *os.File, reply []byte) error {
	err := ioctl(f, IoctlGrant, reply)
	if err != unix.EBADFD {
		return err
	}
	binary.LittleEndian.PutUint32(reply, uint32(f.Fd()))
	return ioctl(f, IoctlGrantShown, reply)
}

// notary grants every request and keeps the last Source.
type notary struct {
	mu     sync.Mutex
	source pagecache.Source
	socket string
	err    error
	// devices are the mount's devices.
	devices []*device
}

func (n *notary) Grant(src pagecache.Source, uid uint32) (Grant, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.source = src
	return Grant{Token: [16]byte{1, 2, 3}, Socket: n.socket}, n.err
}

func (n *notary) GrantStatus(uid uint32) (Grant, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Grant{Token: [16]byte{9}, Socket: n.socket}, n.err
}

// last returns the Source of the last grant.
func (n *notary) last() pagecache.Source {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.source
}

// answer sets the answer to later requests.
func (n *notary) answer(socket string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.socket, n.err = socket, err
}

func TestGrant(t *testing.T) {
	n := &notary{socket: "/run/gaiafs.sock"}
	s := mount(t, func(o *Options) { o.Granter = n })
	require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "d"), 0755))
	f, err := os.Create(filepath.Join(s.mnt, "d/f"))
	require.NoError(t, err)
	reply := bytes.Repeat([]byte{0xff}, GrantSize)
	require.NoError(t, ioctl(f, IoctlGrant, reply))
	assert.EqualValues(t, GrantMagic, binary.LittleEndian.Uint32(reply))
	assert.Equal(t, "gaia", string(reply[:4]))
	assert.EqualValues(t, GrantVersion, binary.LittleEndian.Uint16(reply[4:]))
	assert.EqualValues(t, 0, binary.LittleEndian.Uint16(reply[6:]))
	assert.Equal(t, append([]byte{1, 2, 3}, make([]byte, 13)...), reply[8:24])
	assert.Equal(t, "/run/gaiafs.sock", strings.TrimRight(string(reply[24:]), "\x00"))

	src := n.last()
	assert.Equal(t, "d/f", src.Name())
	assert.True(t, src.Readable())
	assert.True(t, src.Writable())
	assert.True(t, src.Open())
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, "d/f"), &st))
	assert.Equal(t, pagecache.FileID{Dev: st.Dev, Ino: st.Ino}, src.ID())

	require.NoError(t, f.Truncate(15)) // released bytes do not make a file longer
	home, err := src.OpenHome(true)
	require.NoError(t, err)
	defer home.Close()
	assert.True(t, home.Writable())
	_, end, err := home.BeginWrites()
	require.NoError(t, err)
	_, err = home.WriteAt([]byte("from below"), 5)
	require.NoError(t, err)
	end()
	got := make([]byte, 100)
	k, err := home.ReadAt(got, 0)
	require.NoError(t, err)
	assert.Equal(t, "\x00\x00\x00\x00\x00from below", string(got[:k]))
	cached, ok := home.(pagecache.HostCached)
	require.True(t, ok)
	cached.WillNeed(0, 1<<20)
	k, err = cached.ReadCached(got, 0) // all of it, unless the filesystem cannot say
	require.NoError(t, err)
	assert.Equal(t, "\x00\x00\x00\x00\x00from below"[:k], string(got[:k]))
	k, err = cached.ReadCached(got, 1000)
	require.NoError(t, err)
	assert.Zero(t, k, "past end of file")
	sig, err := home.Signature()
	require.NoError(t, err)
	assert.EqualValues(t, 15, sig.Size)
	require.NoError(t, home.Sync())
	assert.NoError(t, src.Kernel().Invalidate(0, -1))
	content, err := os.ReadFile(filepath.Join(s.mnt, "d/f"))
	require.NoError(t, err)
	assert.Equal(t, "\x00\x00\x00\x00\x00from below", string(content))
	assert.Zero(t, s.fs.changed.Load(), "a change made through Home was taken for a foreign one")

	duplicate, err := unix.Dup(int(f.Fd()))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	assert.True(t, src.Open())
	require.NoError(t, unix.Close(duplicate))
	require.Eventually(t, func() bool { return !src.Open() }, eventually, tick)
	_, err = src.OpenHome(false)
	assert.ErrorIs(t, err, unix.EBADF)

	d, err := os.Open(s.mnt)
	require.NoError(t, err)
	defer d.Close()
	require.NoError(t, ioctl(d, IoctlGrant, reply))
	assert.EqualValues(t, 9, reply[8])
	assert.EqualValues(t, GrantForStatus, binary.LittleEndian.Uint16(reply[6:]))
	n.answer("/s", errors.New("no"))
	assert.Equal(t, unix.EIO, ioctl(d, IoctlGrant, reply))
	n.answer(strings.Repeat("s", MaxSocketPath+1), nil)
	assert.Equal(t, unix.ENAMETOOLONG, ioctl(d, IoctlGrant, reply))

	readOnly, err := os.Open(filepath.Join(s.mnt, "d/f"))
	require.NoError(t, err)
	defer readOnly.Close()
	n.answer("/s", nil)
	require.NoError(t, ioctl(readOnly, IoctlGrant, reply))
	assert.False(t, n.last().Writable())
}

// changeFlags sets and clears inode flags of a file, as chattr does.
func changeFlags(path string, set, unset uint32) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := make([]byte, 8)
	if err := ioctl(f, unix.FS_IOC_GETFLAGS, flags); err != nil {
		return err
	}
	binary.NativeEndian.PutUint32(flags, binary.NativeEndian.Uint32(flags)&^unset|set)
	return ioctl(f, unix.FS_IOC_SETFLAGS, flags)
}

func TestInodeFlags(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make a file immutable")
	}
	const immutable, appendOnly, noDump = 0x10, 0x20, 0x40
	everyMode(t, func(t *testing.T, s *scene) {
		if s.fs.unseenOpens && s.fs.writeBack {
			t.Skip("the kernel takes writes to such files, and SOURCE refuses them later")
		}
		path, below := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
		require.NoError(t, os.WriteFile(path, []byte("one"), 0644))
		if err := changeFlags(below, immutable, 0); err != nil {
			t.Skipf("the filesystem of the tests keeps no inode flags: %v", err)
		}
		t.Cleanup(func() { assert.NoError(t, changeFlags(below, 0, immutable|appendOnly)) })
		require.NoError(t, changeFlags(path, noDump, immutable))
		require.NoError(t, changeFlags(below, 0, noDump), "below, the flags can be changed again")

		require.NoError(t, changeFlags(path, immutable, 0))
		writes := func(flags int) error { // a kernel that opens files itself does not know the flags
			f, err := os.OpenFile(path, flags, 0)
			if err == nil {
				defer f.Close()
				_, err = f.WriteAt([]byte("x"), 0)
			}
			return err
		}
		assert.ErrorIs(t, writes(os.O_WRONLY), unix.EPERM)
		assert.ErrorIs(t, os.Remove(path), unix.EPERM)
		assert.ErrorIs(t, os.Chmod(path, 0600), unix.EPERM)

		require.NoError(t, changeFlags(path, appendOnly, immutable))
		assert.ErrorIs(t, writes(os.O_RDWR), unix.EPERM)
		f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.WriteString(" two")
		require.NoError(t, err)
		_, err = f.WriteString(" three")
		require.NoError(t, err)
		for _, at := range []string{path, below} {
			got, err := os.ReadFile(at)
			require.NoError(t, err)
			assert.Equal(t, "one two three", string(got))
		}
		// Stores through a mapping would go to the end of the file instead of their place. Closed opens may still be
		// listed: the kernel reports a close later.
		var of openFile
		header := fuse.InHeader{NodeId: s.nodeOf(t, path)}
		if !s.fs.unseenOpens {
			all := s.fs.files.all()
			i := slices.IndexFunc(all, func(of *openFile) bool { return of.appendOnly })
			require.GreaterOrEqual(t, i, 0)
			of.handle = all[i].handle
		}
		_, status := s.fs.Write(nil, &fuse.WriteIn{InHeader: header, Fh: of.handle, WriteFlags: fuse.WRITE_CACHE},
			[]byte("x"))
		assert.Equal(t, fuse.EPERM, status)

		// Since Linux 5.13 the kernel refuses these before they get here.
		flags := make([]byte, sizeOfXFlags)
		ask := func(uid, cmd uint32) fuse.Status {
			in := fuse.IoctlIn{InHeader: header, Fh: of.handle, Cmd: cmd}
			in.Caller.Uid = uid
			return s.fs.Ioctl(nil, &in, flags, &fuse.IoctlOut{}, nil)
		}
		assert.Equal(t, fuse.EPERM, ask(1, unix.FS_IOC_SETFLAGS), "another user's file")
		require.NoError(t, changeFlags(below, 0, appendOnly))
		require.NoError(t, os.Chown(path, 1, -1))
		binary.NativeEndian.PutUint32(flags, 0x8) // FS_XFLAG_IMMUTABLE
		assert.Equal(t, fuse.EPERM, ask(1, ioctlWriteXFlags), "only the superuser may")
		assert.Equal(t, fuse.OK, ask(0, ioctlWriteXFlags))
		assert.ErrorIs(t, os.Chmod(below, 0600), unix.EPERM)
	})
}
