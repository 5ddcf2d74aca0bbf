package gaiafs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control/controltest"
)

func TestViewLayout(t *testing.T) {
	for _, c := range []struct {
		segments []Segment
		align    int64
		offsets  []int64
		size     int64
	}{
		{[]Segment{{Offset: 7, Length: 1}}, 0, []int64{0}, 1},
		{[]Segment{{Length: 1}, {Length: 256}, {Length: 257, Count: 1}, {Length: 3, Stride: 3, Count: 5}, {Length: 1}},
			0,
			[]int64{0, 256, 512, 1024, 1280}, 1281},
		{[]Segment{{Length: 5}, {Length: 3, Stride: 99, Count: 2}, {Length: 1}}, 1, []int64{0, 5, 11}, 12},
		{[]Segment{{Length: 1}, {Length: 1}}, 2 << 20, []int64{0, 2 << 20}, 2<<20 + 1},
		{[]Segment{{Offset: math.MaxInt64 - 1, Length: 1}, {Length: 1<<62 - 256}}, 0, []int64{0, 256}, 1 << 62},
		{[]Segment{{Length: 4, Stride: -1}, {Length: 1, Stride: math.MaxInt64 >> 24, Count: 1<<24 - 1}}, 4,
			[]int64{0, 4}, 3 + 1<<24},
	} {
		offsets, size, err := ViewLayout(c.segments, c.align)
		require.NoError(t, err)
		require.Equal(t, c.offsets, offsets)
		require.Equal(t, c.size, size)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 { // check against the definition, byte by byte
		align := int64(1) << r.IntN(8)
		var segments []Segment
		var want []int64
		end := int64(0)
		for range 1 + r.IntN(20) {
			s := Segment{Offset: r.Int64N(1000), Length: 1 + r.Int64N(40), Stride: 40 + r.Int64N(9), Count: r.Int64N(4)}
			segments = append(segments, s)
			for end%align != 0 {
				end++
			}
			want = append(want, end)
			for range max(s.Count, 1) {
				end += s.Length
			}
		}
		offsets, size, err := ViewLayout(segments, align)
		require.NoError(t, err)
		require.Equal(t, want, offsets)
		require.Equal(t, end, size)
	}
}

func TestBadViews(t *testing.T) {
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "plain"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	defer f.Close()
	writeOnly, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer writeOnly.Close()
	directory, err := os.Open(filepath.Dir(f.Name()))
	require.NoError(t, err)
	defer directory.Close()
	one := []Segment{{Length: 1}}
	in := func(s ...Segment) []Segment { return s }
	many := func(n int) []Segment {
		s := make([]Segment, n)
		for i := range s {
			s[i].Length = 1
		}
		return s
	}
	before := openDescriptors(t)
	for name, c := range map[string]struct {
		files    []*os.File
		segments []Segment
		device   int
		align    int64
		want     syscall.Errno
		text     string
	}{
		"not of a mount":      {[]*os.File{f}, one, 0, 0, syscall.ENOTTY, "not on a gaiafs mount"},
		"as many as there be": {[]*os.File{f}, many(maxSegments), 0, 0, syscall.ENOTTY, ""},
		"no files":            {nil, one, 0, 0, syscall.EINVAL, "0 files"},
		"many files":          {make([]*os.File, maxFiles+1), one, 0, 0, syscall.EINVAL, "16385 files"},
		"no segments":         {[]*os.File{f}, nil, 0, 0, syscall.EINVAL, "no segments"},
		"many segments":       {[]*os.File{f}, many(maxSegments + 1), 0, 0, syscall.EINVAL, "524289 segments"},
		"many rows": {[]*os.File{f}, in(Segment{Length: 1, Stride: 1, Count: 1 << 24}, Segment{Length: 1}), 0, 0,
			syscall.EINVAL,
			"segment 1"},
		"many rows at once": {[]*os.File{f}, in(Segment{Length: 1, Stride: 1, Count: math.MaxInt64}), 0, 0,
			syscall.EINVAL, "segment 0"},
		"no length": {[]*os.File{f}, in(one[0], Segment{}), 0, 0, syscall.EINVAL,
			"segment 1 has a length of 0"},
		"negative length": {[]*os.File{f}, in(Segment{Length: -1}), 0, 0, syscall.EINVAL, "segment 0"},
		"negative offset": {[]*os.File{f}, in(Segment{Offset: -1, Length: 1}), 0, 0, syscall.EINVAL, "segment 0"},
		"negative count":  {[]*os.File{f}, in(Segment{Length: 1, Count: -1}), 0, 0, syscall.EINVAL, "segment 0"},
		"short stride": {[]*os.File{f}, in(Segment{Length: 9, Stride: 8, Count: 2}), 0, 0, syscall.EINVAL,
			"stride of only 8"},
		"far offset": {[]*os.File{f}, in(Segment{Offset: math.MaxInt64, Length: 1}), 0, 0, syscall.EOVERFLOW,
			"segment 0"},
		"far row": {[]*os.File{f}, in(Segment{Length: 1, Stride: 1 << 62, Count: 3}), 0, 0, syscall.EOVERFLOW,
			"segment 0"},
		"far end": {[]*os.File{f}, in(Segment{Offset: 1 << 62, Length: 1 << 61, Stride: 1 << 61, Count: 2}), 0, 0,
			syscall.EOVERFLOW,
			"segment 0"},
		"large": {[]*os.File{f}, in(Segment{Length: 1 << 62}, one[0]), 0, 0, syscall.EINVAL,
			"segment 1: the view is larger"},
		"larger": {[]*os.File{f}, in(one[0], Segment{Length: math.MaxInt64}), 0, 0, syscall.EINVAL,
			"segment 1: the view is larger"},
		"odd alignment":   {[]*os.File{f}, one, 0, 3, syscall.EINVAL, "alignment 3"},
		"large alignment": {[]*os.File{f}, one, 0, 4 << 20, syscall.EINVAL, "alignment 4194304"},
		"no such file": {[]*os.File{f}, in(one[0], Segment{File: 1, Length: 1}), 0, 0, syscall.EINVAL,
			"segment 1 is of file 1"},
		"negative file": {[]*os.File{f}, in(Segment{File: -1, Length: 1}), 0, 0, syscall.EINVAL,
			"segment 0 is of file -1"},
		"negative device": {[]*os.File{f}, one, -1, 0, syscall.ENODEV, ""},
		"write-only":      {[]*os.File{f, writeOnly}, one, 0, 0, syscall.EACCES, ""},
		"directory":       {[]*os.File{f, directory}, one, 0, 0, syscall.EINVAL, ""},
		"nil file":        {[]*os.File{f, nil}, one, 0, 0, syscall.EBADF, ""},
	} {
		v, err := MapView(c.files, c.segments, c.device, Align(c.align))
		require.Nil(t, v, name)
		require.ErrorIs(t, err, c.want, name)
		require.ErrorContains(t, err, c.text, name)
		require.ErrorContains(t, err, "map view", name)
	}
	require.Equal(t, before, openDescriptors(t))
	_, err = Map(f, 0, 4096, ProtRead, 0, Align(256))
	require.ErrorIs(t, err, syscall.EINVAL)
}

// The recorded daemon has a view of 0x1234 bytes.
func TestViewRequest(t *testing.T) {
	answers := map[uint16][]string{1: {"welcome-view"}, 7: {"result"}, 13: {"result"}, 14: {"result"},
		16: {"mapped-view", "extents-view"}}
	r, f := recorded(t, answers)
	segments := []Segment{{Offset: 0x5678, Length: 0x1234, Stride: 5}}
	v, err := MapView([]*os.File{f}, segments, 3, OnKind(KindEmulated), Lazy())
	require.NoError(t, err)
	require.EqualValues(t, 0x1234, v.Len())
	require.Zero(t, v.Offset(0))
	require.Equal(t, make([]byte, 0x1234), v.Bytes())
	require.NoError(t, v.Close())
	want := loadFrames(t)["mapview"][headerSize:]
	copy(want[48:64], make([]byte, 16)) // the token
	require.Equal(t, want, r.First(16))
	require.Equal(t, featuresBody(11, ""), r.First(13))
	require.Empty(t, r.Unexpected())

	segments[0].Length++
	_, err = MapView([]*os.File{f}, segments, 3, OnKind(KindEmulated))
	require.ErrorIs(t, err, syscall.EPROTO)

	for _, answers := range []map[uint16][]string{controltest.Version1, {1: {"welcome2"}, 13: {"result"}}} {
		r, f := recorded(t, answers)
		_, err := MapView([]*os.File{f}, segments, 3, OnKind(KindEmulated))
		require.ErrorIs(t, err, syscall.ENOTSUP)
		require.Empty(t, r.Unexpected())
	}
}

// TestLargeRequest checks how a body travels that is longer than a frame.
func TestLargeRequest(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	ends := make([]*net.UnixConn, 2)
	for i, fd := range pair {
		file := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(file)
		require.NoError(t, err)
		file.Close()
		ends[i] = c.(*net.UnixConn)
		defer c.Close()
	}
	c := &conn{uc: ends[0], welcome: welcome{version: 2, offered: featureLarge}}
	for _, size := range []int{0, maxRequest - headerSize, maxRequest - headerSize + 1, 20 << 20} {
		body := bytes.Repeat([]byte{1, 2, 3, 4, 5}, size/5+1)[:size]
		frame, memory, err := c.message(typeMapView, 9, body)
		require.NoError(t, err)
		require.NoError(t, c.write(frame, memory))
		if memory >= 0 {
			require.NoError(t, unix.Close(memory))
		}
		_, got, fds, _, err := newReceiver(ends[1]).next()
		require.NoError(t, err)
		if size > maxRequest-headerSize {
			require.EqualValues(t, size, binary.LittleEndian.Uint64(got))
			require.Len(t, fds, 1)
			seals, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GET_SEALS, 0)
			require.NoError(t, err)
			require.Equal(t, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW, seals)
			f := os.NewFile(uintptr(fds[0]), "body")
			got, err = io.ReadAll(io.NewSectionReader(f, 0, 1<<30))
			require.NoError(t, err)
			f.Close()
		}
		require.True(t, bytes.Equal(body, got))
	}
	c.welcome.offered = 0
	_, _, err = c.message(typeMapView, 9, make([]byte, maxRequest))
	require.True(t, errors.Is(err, syscall.E2BIG))
}

func TestAlignedMemory(t *testing.T) {
	for align := int64(1); align <= maxAlign; align *= 2 {
		h, err := reserveHost(0, 3*pageSize, align, ProtRead)
		require.NoError(t, err)
		require.Zero(t, int64(uintptr(h.start))%max(align, pageSize))
		require.NoError(t, h.drop())
	}
	before := addressSpace(t)
	held := make([]*hostMemory, 1000)
	for i := range held { // of various sizes, so that ranges are not aligned by chance
		h, err := reserveHost(0, int64(1+i%13)*pageSize, 1<<20, ProtRead)
		require.NoError(t, err)
		held[i] = h
	}
	for _, h := range held {
		require.NoError(t, h.drop())
	}
	require.Less(t, addressSpace(t), before+100<<20, "up to 1 MiB leaks per mapping")
}

// addressSpace returns the size of this process's address space in use, in bytes.
func addressSpace(t *testing.T) (bytes int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	_, err = fmt.Sscan(string(text), &bytes)
	require.NoError(t, err)
	return bytes * pageSize
}

// The daemon sends a view's memory before its bytes. If these fail, the view is given back.
func TestMapViewWithoutItsBytes(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{Gate: func(context.Context) error { return syscall.EIO }})
	_, err := MapView([]*os.File{d.file(t, 4096)}, []Segment{{Length: 4096}}, 0)
	require.ErrorIs(t, err, syscall.EIO)
	d.waitMapped(t, 0)
}
