package control_test

import (
	"encoding/binary"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control/controltest"
)

// memfd makes a memfd of n bytes, sealed or not.
func memfd(t *testing.T, n int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("body", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "body")
	t.Cleanup(func() { f.Close() })
	require.NoError(t, f.Truncate(n))
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	require.NoError(t, err)
	return f
}

const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// sendLarge sends a request whose body is in descriptors.
func (c *client) sendLarge(typ uint16, id uint64, n uint64, files ...*os.File) {
	c.t.Helper()
	b := frame(typ, id, n)
	binary.LittleEndian.PutUint16(b[6:], 2)
	c.sendWith(b, files...)
}

func (c *client) sendWith(b []byte, files ...*os.File) {
	c.t.Helper()
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	_, _, err := c.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	require.NoError(c.t, err)
}

func TestLargeRequests(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, _ := s.connectAll()
	result := func(id uint64) syscall.Errno {
		t.Helper()
		r := c.read()
		require.Equal(t, uint16(result), r.typ)
		require.Equal(t, id, r.id)
		return r.errno()
	}
	const most = 32 << 20
	for i, c2 := range []struct {
		n    uint64
		file *os.File
		want syscall.Errno
	}{
		{1 << 20, memfd(t, 1<<20, sealed), 0},
		{0, memfd(t, 0, sealed), 0},
		{most, memfd(t, most, sealed), 0},
		{most + 1, memfd(t, most+1, sealed), syscall.E2BIG},
		{1 << 63, memfd(t, 4096, sealed), syscall.E2BIG},
		{4097, memfd(t, 4096, sealed), syscall.EINVAL},
		{4096, memfd(t, 4096, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW), syscall.EINVAL},
		{4096, memfd(t, 4096, unix.F_SEAL_WRITE|unix.F_SEAL_GROW), syscall.EINVAL},
	} {
		c.sendLarge(ping, uint64(10+i), c2.n, c2.file)
		require.Equal(t, c2.want, result(uint64(10+i)), "%d: %d bytes", i, c2.n)
	}
	pipe, other, err := os.Pipe()
	require.NoError(t, err)
	defer other.Close()
	defer pipe.Close()
	for id := range uint64(20) { // each descriptor is closed by its own goroutine
		c.sendLarge(ping, 100+id, 8, pipe)
		require.Equal(t, syscall.EINVAL, result(100+id))
	}
	// A request of another type, with a long and valid body.
	f := memfd(t, 32, 0)
	body := rangeFrame(acquire, 0, 77, 0, 1, 0)[16:]
	_, err = f.WriteAt(body, 0)
	require.NoError(t, err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sealed)
	require.NoError(t, err)
	c.sendLarge(acquire, 200, 32, f)
	r := c.read()
	require.Equal(t, syscall.EINVAL, r.errno())
	require.Contains(t, r.text(), "mapping 77")
	// A body that is too short is a breach, even in a descriptor.
	c.sendLarge(acquire, 201, 31, f)
	require.Equal(t, syscall.EPROTO, c.ended().errno())
}

func TestDescriptorsThatAreNotExpected(t *testing.T) {
	s := start(t, &controltest.Cache{})
	f := memfd(t, 4096, sealed)
	for name, send := range map[string]func(c *client){
		"too many":    func(c *client) { c.sendLarge(ping, 1, 8, f, f) },
		"none":        func(c *client) { c.sendLarge(ping, 1, 8) },
		"not flagged": func(c *client) { c.sendWith(frame(ping, 1), f) },
		"id 0":        func(c *client) { c.sendLarge(ping, 0, 8, f) },
		"short":       func(c *client) { b := frame(ping, 1, uint32(1)); b[6] = 2; c.sendWith(b, f) },
	} {
		c, _ := s.connectAll()
		send(c)
		require.Equal(t, syscall.EPROTO, c.ended().errno(), name)
	}
	c, _ := s.connect2() // did not choose the feature
	c.sendLarge(ping, 1, 8, f)
	require.Equal(t, syscall.EPROTO, c.ended().errno())
	_, service := s.connectAll()
	service.sendLarge(answer, 1, 8, f)
	service.ended()
	require.Eventually(t, func() bool { return links(t, f) == 1 }, 30e9, 1e6, "descriptors stayed open")
}

// TestNoDescriptorLeftForALargeRequest: the request fails, and the connection goes on.
func TestNoDescriptorLeftForALargeRequest(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, _ := s.connectAll()
	f := memfd(t, 8, sealed)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	free, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the lowest free number
	require.NoError(t, err)
	require.NoError(t, unix.Close(free))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: limit.Max}))
	c.sendLarge(ping, 1, 8, f)
	r := c.read()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.Equal(t, uint16(result), r.typ)
	require.Equal(t, uint64(1), r.id)
	require.Equal(t, syscall.EMFILE, r.errno(), r.text())
	c.sendLarge(ping, 2, 8, f)
	r = c.read()
	require.Equal(t, uint64(2), r.id)
	require.Zero(t, r.errno())
}

// links returns how many descriptors of the file this process has.
func links(t *testing.T, f *os.File) (n int) {
	want, err := f.Stat()
	require.NoError(t, err)
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if st, err := os.Stat("/proc/self/fd/" + e.Name()); err == nil && os.SameFile(want, st) {
			n++
		}
	}
	return n
}
