package pagecache

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

const peerFile = 300 * page.Size

func peerPages(f *File) int64 { return f.counters.PeerCopyPages.Load() }

// TestPeerCopies: pages for which another device has home's bytes come from there: pages that nobody maps for writing,
// and pages that programs could have stored into and did not.
func TestPeerCopies(t *testing.T) {
	for _, writable := range []bool{false, true} {
		m := newMachine(t, 3)
		src := m.noisyFile(peerFile - 7)
		m.run(src, 0, 0, peerFile, writable)
		q := m.run(src, 1, 0, peerFile, writable)
		require.EqualValues(t, 300, peerPages(src.attached))
		require.EqualValues(t, 1, src.attached.counters.PeerCopies.Load())
		require.True(t, bytes.Equal(src.home.data, q.load(0, peerFile-7)))
		require.Equal(t, make([]byte, 7), q.load(peerFile-7, peerFile))
		if writable {
			require.Zero(t, q.release(), "the copy has the agreed bytes")
			q.add(5)
			require.EqualValues(t, 1, q.release())
			require.Equal(t, q.load(0, page.Size), src.read(t, 0, page.Size))
		}
		r := m.run(src, 2, 10*page.Size, 100*page.Size, false)
		require.EqualValues(t, 400, peerPages(src.attached))
		require.True(t, bytes.Equal(src.home.data[10*page.Size:110*page.Size], r.all()))
	}
}

// TestPeerWithUnreleasedStores: a device's unreleased bytes are not home's, and nobody else sees them. Its released
// bytes are.
func TestPeerWithUnreleasedStores(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(peerFile)
	p := m.run(src, 0, 0, peerFile, true)
	p.add(50 * page.Size)
	p.release()
	p.add(100 * page.Size) // not released
	q := m.run(src, 1, 0, peerFile, false)
	want := bytes.Clone(p.all())
	want[100*page.Size]--
	require.True(t, bytes.Equal(want, q.all()))
	require.EqualValues(t, 299, peerPages(src.attached), "all except the page with the store")
	require.EqualValues(t, 1, p.release())
	require.EqualValues(t, 1, q.acquire())
	require.True(t, bytes.Equal(p.all(), q.all()))
}

// TestPeerStoresDuringTheCopy: programs store into the source during the copy. Torn pages come from home.
func TestPeerStoresDuringTheCopy(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(peerFile)
	p := m.run(src, 0, 0, peerFile, true)
	gate := m.devices[1].Hold(faulty.CopyPeer)
	mapped := make(chan error, 1)
	var mp *Mapping
	go func() {
		var err error
		mp, err = m.cache.Map(context.Background(), src, MapRequest{Device: 1, Len: peerFile})
		mapped <- err
	}()
	<-gate.Arrived()
	p.add(7*page.Size + 1)
	gate.Open()
	require.NoError(t, <-mapped)
	q := m.attach(mp, 0, peerFile, false)
	require.True(t, bytes.Equal(src.home.bytes(0, peerFile), q.all()), "home's bytes, not unreleased ones")
	require.EqualValues(t, 299, peerPages(src.attached))
}

// TestPeersOfDifferentKeys: a device cannot use digests made with another key. Pages that nobody can store into are
// still copied.
func TestPeersOfDifferentKeys(t *testing.T) {
	keys := make([]*gpubackend.DigestKey, 2)
	for i := range keys {
		var err error
		keys[i], err = gpubackend.NewDigestKey(rand.Reader)
		require.NoError(t, err)
	}
	m := newKeyedMachine(t, keys)
	for writable, pages := range map[bool]int{true: 0, false: 300} {
		src := m.noisyFile(peerFile)
		m.run(src, 0, 0, 100*page.Size, writable)
		m.run(src, 0, 0, peerFile, false)
		q := m.run(src, 1, 0, peerFile, false)
		require.EqualValues(t, pages, peerPages(src.attached))
		require.True(t, bytes.Equal(src.home.data, q.all()))
	}
}

// TestNoWayBetweenDevices: bytes go through the host, and the direct copy is not tried again.
func TestNoWayBetweenDevices(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(peerFile)
	m.run(src, 0, 0, peerFile, false)
	m.devices[1].Fail(faulty.CopyPeer, 1, gpubackend.ErrNoPeer)
	q := m.run(src, 1, 0, peerFile, false)
	require.True(t, bytes.Equal(src.home.data, q.all()))
	require.Zero(t, peerPages(src.attached))
	other := m.noisyFile(peerFile)
	m.run(other, 0, 0, peerFile, false)
	m.run(other, 1, 0, peerFile, false)
	require.Equal(t, 1, m.devices[1].Calls(faulty.CopyPeer))
}

// TestRefreshFromPeer: stale pages that nobody stores into are refreshed from an up-to-date device, and short runs from
// home.
func TestRefreshFromPeer(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(peerFile)
	p := m.run(src, 0, 0, peerFile, true)
	q := m.run(src, 1, 0, peerFile, false)
	before := peerPages(src.attached)
	for i := 20; i < 60; i++ {
		p.add(i * page.Size)
	}
	p.add(200 * page.Size)
	p.release()
	require.EqualValues(t, 41, q.acquire())
	require.True(t, bytes.Equal(p.all(), q.all()))
	require.EqualValues(t, 40, peerPages(src.attached)-before)
	require.EqualValues(t, 1, src.attached.counters.RefreshedPages.Load())
}

// TestPathsAreOpened: soon after the mount each device has copied from each other one, so no program waits until the
// driver has opened the path. The copies are not counted, leave no memory behind, and may fail.
func TestPathsAreOpened(t *testing.T) {
	m := newMachine(t, 3)
	m.devices[2].Fail(faulty.CopyPeer, 1, errors.New("no path yet"))
	m.cache.Stage(t.Context())
	require.Eventually(t, func() bool {
		return !slices.ContainsFunc(m.devices, func(d *faulty.Device) bool {
			return d.Calls(faulty.CopyPeer) != 2
		})
	}, time.Minute, time.Millisecond)
	for _, d := range m.cache.devices {
		require.Empty(t, d.moves.Moved())
	}
}

// TestMapWhilePathsOpen: opening paths takes nothing of what programs may map.
func TestMapWhilePathsOpen(t *testing.T) {
	const all = 8 << 20
	m := newMachine(t, 2, memory(all))
	gate := m.devices[0].Hold(faulty.CopyPeer)
	m.cache.Stage(t.Context())
	<-gate.Arrived()
	mapped, err := m.cache.Map(t.Context(), m.noisyFile(all), MapRequest{Device: 0, Len: all})
	gate.Open()
	require.NoError(t, err)
	require.NoError(t, mapped.Unmap(t.Context()))
}
