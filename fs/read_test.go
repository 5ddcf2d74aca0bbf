package fs

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestErrorInTheMiddleOfARead makes the backing file fail after its first page, as a bad disk does: the backing file is
// this process's memory. A read into the kernel's cache fails, because a short answer would mean end of file. A direct
// read is short.
func TestErrorInTheMiddleOfARead(t *testing.T) {
	s := mount(t)
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), []byte("bytes"), 0600))
	f, err := os.Open(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	defer f.Close()
	memory, err := os.Open("/proc/self/mem")
	require.NoError(t, err)
	defer memory.Close()
	of := s.fs.files.all()[0]
	require.NoError(t, unix.Dup3(int(memory.Fd()), of.fd, unix.O_CLOEXEC))

	// A mapping of two pages of a file that has only one.
	short, err := os.Create(filepath.Join(t.TempDir(), "short"))
	require.NoError(t, err)
	defer short.Close()
	good := bytes.Repeat([]byte("good"), page.Size/4)
	_, err = short.Write(good)
	require.NoError(t, err)
	at, err := unix.MmapPtr(int(short.Fd()), 0, nil, 2*page.Size, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.MunmapPtr(at, 2*page.Size)) }()

	in := fuse.ReadIn{Fh: of.handle, Offset: uint64(uintptr(at))}
	buf := make([]byte, 2*page.Size)
	_, status := s.fs.Read(nil, &in, buf)
	require.Equal(t, fuse.EIO, status)

	in.ReadFlags = fuse.READ_LOCKOWNER // it passes the kernel's pages
	result, status := s.fs.Read(nil, &in, buf)
	require.Equal(t, fuse.OK, status)
	got, status := result.Bytes(nil)
	require.Equal(t, fuse.OK, status)
	require.Equal(t, good, got)

	in.Offset += page.Size
	_, status = s.fs.Read(nil, &in, buf)
	require.Equal(t, fuse.EIO, status)
}
