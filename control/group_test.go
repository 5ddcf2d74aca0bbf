package control_test

import (
	"encoding/binary"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
)

const (
	beginGroup   = 20
	releaseGroup = 21
	abortGroup   = 22
	acquireAll   = 23
	numbered     = 0x8007
)

// connectGroups is connectAll for a client that chooses groups.
func (s *server) connectGroups() *client {
	s.t.Helper()
	c, _ := s.connect2()
	require.Zero(s.t, c.call(frame(choose, 1, uint64(16|8|2), uint64(0))).errno())
	return c
}

// number returns the number in a NUMBERED.
func (c *client) number(b []byte) uint64 {
	c.t.Helper()
	c.send(b)
	r := c.read()
	require.Equal(c.t, uint16(numbered), r.typ, "%x", r.body)
	return binary.LittleEndian.Uint64(r.body)
}

func TestGroups(t *testing.T) {
	s := start(t, &controltest.Cache{Devices: 1})
	c := s.connectGroups()
	c.mapOne2(s)
	one := func(m, off, n uint64) []any { return []any{uint32(1), uint32(24), m, off, n} }
	begin := func(m, off, n uint64) []byte { return frame(beginGroup, 2, one(m, off, n)...) }
	acquireAt := func(least uint64, flags uint32) []byte {
		return frame(acquireAll, 2, append([]any{least, uint32(1), flags}, one(1, 0, 1)...)...)
	}
	g := c.number(begin(1, 0, 4096))
	require.Zero(t, c.number(acquireAt(0, 0)))
	require.Equal(t, syscall.ETIMEDOUT, c.call(acquireAt(1, 0)).errno())
	require.EqualValues(t, 1, c.number(frame(releaseGroup, 2, g)))
	require.EqualValues(t, 1, c.number(acquireAt(1, 1)))
	require.Equal(t, syscall.EINVAL, c.call(frame(releaseGroup, 2, g)).errno(), "the group was released before")
	require.Equal(t, syscall.EINVAL, c.call(acquireAt(1, 2)).errno())
	require.Zero(t, c.call(frame(abortGroup, 2, c.number(begin(1, 0, 1)))).errno())
	require.Equal(t, syscall.EINVAL, c.call(frame(abortGroup, 2, uint64(2))).errno())

	for _, r := range [][3]uint64{{1, 0, 0}, {1, 16 * 4096, 1}, {1, 0, 1 << 63}, {7, 0, 1}} {
		require.Equal(t, syscall.EINVAL, c.call(begin(r[0], r[1], r[2])).errno())
	}
	require.Equal(t, syscall.EINVAL, c.call(frame(beginGroup, 2, uint32(0), uint32(24))).errno())
	require.Equal(t, syscall.EINVAL, c.call(frame(beginGroup, 2, ^uint32(0), uint32(24))).errno())
	for range 64 {
		c.number(begin(1, 0, 1))
	}
	require.Equal(t, syscall.ENOMEM, c.call(begin(1, 0, 1)).errno())

	for range 300 { // more than may wait at once
		late := frame(acquireAll, 2, append([]any{uint64(99), uint32(0), uint32(0)}, one(1, 0, 1)...)...)
		require.Equal(t, syscall.ETIMEDOUT, c.call(late).errno())
	}
	require.Zero(t, c.call(frame(unmap, 3, uint64(1))).errno(), "no refused request has the mapping still")

	plain, _ := s.connectAll()
	require.Equal(t, syscall.EOPNOTSUPP, plain.call(begin(1, 0, 1)).errno())
	c.send(frame(beginGroup, 2, uint32(2), uint32(24), uint64(1)))
	require.Contains(t, c.ended().text(), "body has")
}
