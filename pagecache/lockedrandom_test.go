package pagecache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestRandomLockedFiles: while files are pinned on the host, unpinned, hot, changed and loaded, owners and limits
// change, and locking fails, views have the right bytes and nothing hangs. In the end all memory is given back.
func TestRandomLockedFiles(t *testing.T) {
	m := newMachine(t, 2, pinnedMemory(3*leastLocked))
	m.cache.relockAfter, m.cache.hotAge = time.Millisecond, 2*time.Millisecond
	until := time.Now().Add(500 * time.Millisecond)
	var files []*source
	var all sync.WaitGroup
	for i := range 6 {
		src, rnd := m.noisyFile(1500*page.Size+7), rand.New(rand.NewPCG(rand.Uint64(), 0))
		files = append(files, src)
		all.Go(func() {
			keep := m.view(ViewRequest{Device: i % 2, Segments: []view.Segment{bytesOf(0, 100)}}, src)
			defer keep.unmap()
			for time.Now().Before(until) {
				m.changeLocked(src, rnd)
				v := m.view(ViewRequest{Device: rnd.IntN(2), Segments: []view.Segment{
					bytesOf(int64(rnd.IntN(1000*page.Size)), int64(1+rnd.IntN(400*page.Size)))}}, src)
				v.check()
				v.unmap()
			}
			m.cache.Lookup(src.id).SetPinning(Pinning{})
		})
	}
	all.Go(func() {
		rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
		for time.Now().Before(until) {
			m.limitLocked(files, rnd)
			time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
		}
	})
	all.Wait()
	require.Eventually(t, func() bool {
		m.cache.collectDue(t.Context())
		busy := m.cache.pinned.Files()+m.cache.pinned.Hot() > 0
		for _, f := range m.cache.snapshotFiles() {
			f.locking.heat.read.Store(0)
			busy = busy || f.locking.heat.hot.Load() || len(f.locking.one) > 0
		}
		return !busy
	}, 20*time.Second, 5*time.Millisecond)
	for _, src := range files {
		m.unlocked(src)
	}
	used, spare := m.cache.pinned.Used()
	require.Equal(t, spare, used)
}

// changeLocked changes a file, its pin, or what of it is locked.
func (m *machine) changeLocked(src *source, rnd *rand.Rand) {
	f := m.cache.Lookup(src.id)
	switch rnd.IntN(7) {
	case 6:
		f.locking.heat.read.Store(1 << 40)
	case 0:
		f.SetPinning(Pinning{})
	case 1, 2:
		f.SetPinning(Pinning{Host: true, User: []uint32{0, 12345, 54321}[rnd.IntN(3)]})
	case 3:
		patience := 20 * time.Second
		if rnd.IntN(2) == 0 {
			patience = time.Duration(rnd.IntN(20000)) * time.Microsecond
		}
		ctx, cancel := context.WithTimeout(m.t.Context(), patience)
		defer cancel()
		err := m.cache.LockHome(ctx, src)
		expected := []error{nil, syscall.EINVAL, syscall.ENOSPC, syscall.EDQUOT, syscall.EAGAIN, syscall.EOPNOTSUPP}
		assert.True(m.t, patience < time.Second && ctx.Err() != nil ||
			slices.ContainsFunc(expected, func(want error) bool { return errors.Is(err, want) }), err)
	case 4:
		src.write(m.t, rnd.IntN(1400*page.Size), bytes.Repeat([]byte{byte(rnd.Int())}, 1+rnd.IntN(10000)))
	default:
		src.truncate(m.t, int64(1400*page.Size+rnd.IntN(100*page.Size)))
	}
}

// limitLocked changes limits, makes locking fail, evicts files, or does what the background does.
func (m *machine) limitLocked(files []*source, rnd *rand.Rand) {
	ctx, cancel := context.WithTimeout(m.t.Context(), 20*time.Second)
	defer cancel()
	switch rnd.IntN(6) {
	case 0:
		assert.NoError(m.t, m.cache.SetPinnedMemory(ctx, int64(rnd.IntN(5)*leastLocked+rnd.IntN(2))))
	case 1:
		assert.NoError(m.t, m.cache.SetUserShare([]float64{0.1, 0.5, 1}[rnd.IntN(3)]))
	case 2:
		m.devices[rnd.IntN(2)].Fail(faulty.LockHost, 1, errors.New("injected"))
	case 3:
		for _, src := range files {
			_, err := m.cache.Evict(ctx, src.id, -1)
			assert.NoError(m.t, err)
		}
	default:
		m.cache.collectDue(ctx)
	}
}
