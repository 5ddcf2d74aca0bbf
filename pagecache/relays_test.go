package pagecache

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// relayed returns a machine on which views of a large file are filled over all links, and the file.
func relayed(t *testing.T, devices int) (*machine, *source, ViewRequest) {
	m := newMachine(t, devices, memory(512<<20))
	m.cache.neighbourLinks, m.cache.leastRelayed = true, 1<<20
	const size = 24 << 20
	return m, m.noisyFile(size), ViewRequest{Segments: []view.Segment{{Offset: 100, Length: size - 300, Count: 1}}}
}

// through returns the bytes that went through a device to others.
func (m *machine) through(device int) (n int64) {
	for _, x := range m.cache.devices[device].moves.Moved() {
		if x.Way == "through" {
			n += x.Bytes
		}
	}
	return n
}

// whileStuck makes a view on device 0 while its own link carries nothing until done returns true.
func whileStuck(m *machine, src *source, req ViewRequest, done func() bool) (*viewer, error) {
	gate := m.devices[0].Hold(faulty.CopyIn)
	var group sync.WaitGroup
	var v *viewer
	var err error
	group.Go(func() { v, err = m.tryView(req, src) })
	<-gate.Arrived()
	require.Eventually(m.t, done, time.Minute, time.Millisecond)
	gate.Open()
	group.Wait()
	return v, err
}

// TestNeighboursLinksAreUsed: pieces that the device's own link has no time for come over the neighbours' links, and
// the neighbours get their memory back.
func TestNeighboursLinksAreUsed(t *testing.T) {
	m, src, req := relayed(t, 3)
	before := m.used()
	v, err := whileStuck(m, src, req, func() bool { return m.through(1)+m.through(2) > 0 })
	require.NoError(t, err)
	v.check()
	v.unmap()
	m.cache.Lookup(src.id).views.drop()
	require.Eventually(t, func() bool { return m.used() == before }, time.Minute, time.Millisecond)
}

// idleRelayMemory returns the memory of relays that no fill uses.
func (c *Cache) idleRelayMemory() (list []gpubackend.Memory) {
	c.idleRelays.mu.Lock()
	defer c.idleRelays.mu.Unlock()
	for _, idle := range c.idleRelays.list {
		for _, x := range idle {
			list = append(list, x.relay.Memory)
		}
	}
	return list
}

// TestRelaysAreKept: the next fill uses the same staging memory. It is freed after a while, and at once if its relay
// failed.
func TestRelaysAreKept(t *testing.T) {
	m, src, req := relayed(t, 2)
	fill := func() {
		v, err := whileStuck(m, src, req, func() bool { return m.through(1) > 0 })
		require.NoError(t, err)
		v.check()
		v.unmap()
		m.cache.Lookup(src.id).views.drop()
	}
	fill()
	kept := m.cache.idleRelayMemory()
	require.Len(t, kept, relaysEach)
	m.devices[1].SetFree(0)
	fill()
	require.ElementsMatch(t, kept, m.cache.idleRelayMemory())
	m.cache.idleRelays.trim(time.Hour)
	require.Len(t, m.cache.idleRelayMemory(), relaysEach)

	m.devices[1].Fail(faulty.CopyIn, 1, errors.New("the link is broken"))
	before := m.devices[1].Calls(faulty.CopyIn)
	v, err := whileStuck(m, src, req, func() bool { return m.devices[1].Calls(faulty.CopyIn) > before })
	require.NoError(t, err)
	v.check()
	require.Len(t, m.cache.idleRelayMemory(), relaysEach-1)
	m.cache.idleRelays.trim(0)
	require.Empty(t, m.cache.idleRelayMemory())
	for _, mem := range kept {
		require.Error(t, mem.Free(), "it is freed")
	}
	v.unmap()
}

// TestRelaysOfFillsAtOnce: of two fills at once each has relays of its own. Only those of one are kept.
func TestRelaysOfFillsAtOnce(t *testing.T) {
	m, _, _ := relayed(t, 2)
	d := m.cache.devices[0]
	first, back := m.cache.relays(d, 1<<30)
	second, backToo := m.cache.relays(d, 1<<30)
	require.Len(t, first, relaysEach)
	require.Len(t, second, relaysEach)
	back()
	backToo()
	require.Len(t, m.cache.idleRelayMemory(), relaysEach)
	require.Error(t, second[0].Memory.Free(), "it is freed")
}

// TestNeighboursLinksThatFail: pieces that a neighbour began to carry and did not deliver come over other links.
func TestNeighboursLinksThatFail(t *testing.T) {
	broken := errors.New("the link is broken")
	for name, c := range map[string]struct {
		device int
		op     faulty.Op
	}{"into the neighbour": {1, faulty.CopyIn}, "out of it": {0, faulty.CopyPeer}, "no memory": {1, faulty.Alloc}} {
		t.Run(name, func(t *testing.T) {
			m, src, req := relayed(t, 3)
			m.devices[c.device].Fail(c.op, 1, broken)
			v, err := whileStuck(m, src, req, func() bool { return m.through(1)+m.through(2) > 0 })
			require.NoError(t, err)
			v.check()
		})
	}
	t.Run("lost", func(t *testing.T) {
		m, src, req := relayed(t, 2)
		gate := m.devices[1].Hold(faulty.CopyIn)
		v, err := whileStuck(m, src, req, func() bool {
			select {
			case <-gate.Arrived():
				m.devices[1].Lose()
				gate.Open()
				return true
			default:
				return false
			}
		})
		require.NoError(t, err)
		v.check()
	})
}

// TestBusyNeighboursLinksAreNotUsed: neither are links without the option, or for small views.
func TestBusyNeighboursLinksAreNotUsed(t *testing.T) {
	for name, prepare := range map[string]func(m *machine, req *ViewRequest) (end func()){
		"off": func(m *machine, _ *ViewRequest) func() {
			m.cache.neighbourLinks = false
			return func() {}
		},
		"little": func(m *machine, req *ViewRequest) func() {
			m.cache.leastRelayed = leastRelayed
			return func() {}
		},
		"full": func(m *machine, _ *ViewRequest) func() {
			m.devices[1].SetFree(relaySpare*relaysEach*mover.RelayBytes - 1)
			return func() {}
		},
		"busy": func(m *machine, _ *ViewRequest) func() {
			other := m.noisyFile(8 << 20)
			gate := m.devices[1].Hold(faulty.CopyIn)
			var group sync.WaitGroup
			group.Go(func() {
				if _, err := m.tryView(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, 8<<20)}},
					other); err != nil {
					m.t.Error(err)
				}
			})
			<-gate.Arrived()
			return func() {
				gate.Open()
				group.Wait()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, src, req := relayed(t, 2)
			end := prepare(m, &req)
			v := m.view(req, src)
			require.Zero(t, m.through(1))
			end()
			v.check()
		})
	}
}

// TestStagingOfANeighbourIsKept: pieces on their way through a neighbour have not arrived, and their staging memory is
// not reused, until the copy to the device has ended.
func TestStagingOfANeighbourIsKept(t *testing.T) {
	m, src, req := relayed(t, 2)
	in, out := m.devices[0].Hold(faulty.CopyIn), m.devices[0].Hold(faulty.CopyPeer)
	var group sync.WaitGroup
	var v *viewer
	var err error
	group.Go(func() { v, err = m.tryView(req, src) })
	<-out.Arrived()
	in.Open()
	require.Eventually(t, func() bool { // the device's own link has brought the rest
		f := m.cache.Lookup(src.id)
		f.views.mu.Lock()
		defer f.views.mu.Unlock()
		return pagesOf(f.views.parts[0].state.Coming()) <= mover.RelayBytes>>page.Shift
	}, time.Minute, time.Millisecond)
	require.Zero(t, m.through(1))
	out.Open()
	group.Wait()
	require.NoError(t, err)
	require.NotZero(t, m.through(1))
	v.check()
}
