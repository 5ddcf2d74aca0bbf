package control_test

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
)

// connect2 dials, and shakes hands in version 2. It returns the key of the session.
func (s *server) connect2() (c *client, key [16]byte) {
	s.t.Helper()
	c = s.dial()
	c.send(frame(hello, 0, uint32(0x41494147), uint16(1), uint16(2)))
	r := c.read()
	require.Equal(s.t, uint16(welcome), r.typ)
	require.Equal(s.t, uint16(2), binary.LittleEndian.Uint16(r.body))
	return c, [16]byte(r.body[40:])
}

// connectAll makes a complete client: a main connection with all features, and a service connection.
func (s *server) connectAll() (c, service *client) {
	s.t.Helper()
	c, key := s.connect2()
	require.Zero(s.t, c.call(frame(choose, 1, uint64(3), uint64(0))).errno())
	service, _ = s.connect2()
	require.Zero(s.t, service.call(frame(attach, 1, key)).errno())
	return c, service
}

// answerCheck reads a CHECK and answers it.
func (c *client) answerCheck() {
	c.t.Helper()
	r := c.read()
	require.Equal(c.t, uint16(check), r.typ)
	require.NotZero(c.t, r.id)
	c.send(frame(answer, r.id, uint32(0), uint32(0), uint64(0)))
}

func (s *server) waitAttentive(n int) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return s.Stats().Attentive == n }, 30*time.Second, time.Millisecond)
}

func TestFeatures(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, _ := s.connect2()
	require.Equal(t, syscall.EOPNOTSUPP, c.call(frame(choose, 1, uint64(1)<<40, uint64(0))).errno(), "not offered")
	require.Zero(t, c.call(frame(choose, 1, uint64(1), uint64(0), uint64(77))).errno(), "longer than known")
	require.Equal(t, syscall.EINVAL, c.call(frame(choose, 1, uint64(1), uint64(0))).errno(), "twice")
	// What version 2 says about requests in general.
	require.Zero(t, c.call(frame(ping, 2, uint64(0))).errno(), "longer than known")
	flagged := frame(ping, 3)
	binary.LittleEndian.PutUint16(flagged[6:], 4)
	require.Equal(t, syscall.EINVAL, c.call(flagged).errno(), "an unknown flag")
	require.Equal(t, syscall.ENOSYS, c.call(frame(99, 4)).errno())
	require.Equal(t, syscall.ENOSYS, c.call(frame(answer, 5, uint64(0), uint64(0))).errno(),
		"an answer on a main connection")

	named := frame(choose, 3, uint64(1)<<5, uint32(4), uint32(0), []byte("team"))
	mapped, _ := s.connect2()
	mapped.mapOne2(s)
	require.Equal(t, syscall.EINVAL, mapped.call(named).errno(), "its mapping has another tenant")
	first, _ := s.connect2()
	require.Zero(t, first.call(named).errno())

	old := s.connect() // version 1 has none of this
	require.Equal(t, syscall.ENOSYS, old.call(frame(choose, 1, uint64(1), uint64(0))).errno())
	require.Equal(t, syscall.ENOSYS, old.call(frame(attach, 2, [16]byte{})).errno())
	require.Zero(t, old.call(flagged).errno())
	old.send(frame(ping, 4, uint64(0)))
	require.Equal(t, syscall.EPROTO, old.ended().errno())
}

// An extent has its own kind of memory.
func TestExtentsOfVersion2(t *testing.T) {
	s := start(t, &controltest.Cache{Extent: 4 * 4096})
	c, _ := s.connect2()
	c.send(frame(mapFile, 1, s.token(), uint32(0), uint32(3), uint32(0), uint32(1), int64(0), int64(5*4096),
		[16]byte{}))
	require.Equal(t, uint16(mapped), c.read().typ)
	e := c.read()
	require.Equal(t, uint16(extents), e.typ)
	require.Equal(t, 2, e.fds)
	require.Equal(t, frame(extents, 1, uint32(0), uint32(2), uint32(32), uint32(0),
		int64(0), int64(4*4096), uint32(1), uint32(1), uint64(1),
		int64(4*4096), int64(4*4096), uint32(1), uint32(1), uint64(1))[16:], e.body)
	c.send(frame(mapFile, 2, s.token(), uint32(0), uint32(3), uint32(0), uint32(256), int64(0), int64(1), [16]byte{}))
	require.Equal(t, syscall.ENODEV, c.read().errno(), "an unknown kind")
}

func TestServiceConnection(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, service := s.connectAll()
	require.Equal(t, control.Stats{Sessions: 1}, s.Stats(), "a service connection counts toward no limit")
	service.answerCheck()
	s.waitAttentive(1)

	// A notice may want an answer or not.
	require.NoError(t, s.TellForTesting(7))
	r := service.read()
	require.Equal(t, uint16(0x4003), r.typ)
	require.Zero(t, r.id)
	require.Equal(t, frame(0x4003, 0, uint64(7), int64(0), int64(4096))[16:], r.body)
	require.Zero(t, c.call(frame(ping, 1)).errno())

	service.close()
	s.waitAttentive(0)
	require.Zero(t, c.call(frame(ping, 2)).errno(), "the main connection goes on without")
}

// A session's key cannot be guessed, and works once.
func TestAttachIsRefused(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, key := s.connect2()
	other, _ := s.connect2()
	require.Equal(t, syscall.EINVAL, other.call(frame(attach, 1, key)).errno(), "the feature was not chosen")
	require.Zero(t, c.call(frame(choose, 1, uint64(1), uint64(0))).errno())
	require.Equal(t, syscall.EACCES, other.call(frame(attach, 1, [16]byte{1})).errno())
	require.Equal(t, syscall.EINVAL, c.call(frame(attach, 2, key)).errno(), "its own")
	other.mapOne2(s)
	require.Equal(t, syscall.EINVAL, other.call(frame(attach, 1, key)).errno(), "after a MAP")

	first, _ := s.connect2()
	require.Zero(t, first.call(frame(attach, 1, key)).errno())
	second, _ := s.connect2()
	require.Equal(t, syscall.EBUSY, second.call(frame(attach, 1, key)).errno())
	first.close()
	require.Eventually(t, func() bool { return second.call(frame(attach, 1, key)).errno() == 0 }, 30*time.Second,
		time.Millisecond)
	second.answerCheck()
	s.waitAttentive(1)
	// A second answer to a notice, and an answer to one that was never sent.
	second.send(frame(answer, 1, uint32(0), uint32(0), uint64(0)))
	second.send(frame(answer, 2, uint32(0), uint32(0), uint64(0)))
	require.Equal(t, syscall.EPROTO, second.ended().errno())
	require.Zero(t, c.call(frame(ping, 3)).errno())
	third, _ := s.connect2()
	require.Eventually(t, func() bool { return third.call(frame(attach, 1, key)).errno() == 0 }, 30*time.Second,
		time.Millisecond)
	require.Equal(t, uint16(check), third.read().typ)
	third.send(frame(ping, 2))
	require.Equal(t, syscall.EPROTO, third.ended().errno(), "a request on a service connection")
	c.close()
	s.waitSessions(1) // other's
}

// mapOne2 is mapOne in version 2.
func (c *client) mapOne2(s *server) {
	c.t.Helper()
	c.send(mapFrame(1, s.token(), 3, 0, 16*4096))
	require.Equal(c.t, uint16(mapped), c.read().typ)
	require.Equal(c.t, uint16(extents), c.read().typ)
}

// The service connection ends with the main connection.
func TestServiceEndsWithItsClient(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c, service := s.connectAll()
	service.answerCheck()
	c.mapOne2(s)
	c.close()
	service.ended()
	s.waitSessions(0)
	s.waitMapped(0)
}

// A client that does not read its notices is inattentive. It gets no more notices than fit, and is never disconnected.
func TestInattentiveClient(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { o.WriteTimeout = 50 * time.Millisecond })
	c, service := s.connectAll()
	service.answerCheck()
	s.waitAttentive(1)
	told := 0
	// Longer than the timeout of a main connection.
	for last, id := time.Now(), uint64(1); time.Since(last) < 100*time.Millisecond; id++ {
		if s.TellForTesting(7) == nil {
			told, last = told+1, time.Now()
			continue
		}
		require.Zero(t, c.call(frame(ping, id)).errno())
	}
	require.Greater(t, told, 64)
	require.Less(t, told, 1<<20, "the queue has no bound")
	require.Zero(t, s.Stats().Attentive)
	var read atomic.Int64
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			r, err := service.next()
			if err != nil {
				return
			}
			if r.typ == check {
				service.conn.Write(frame(answer, r.id, uint32(0), uint32(0), uint64(0)))
				continue
			}
			read.Add(1)
		}
	})
	s.waitAttentive(1)
	require.NoError(t, s.TellForTesting(7))
	require.Eventually(t, func() bool { return read.Load() == int64(told)+1 }, 30*time.Second, time.Millisecond)
	service.close()
	reader.Wait()
}
