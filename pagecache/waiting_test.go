package pagecache

import (
	"context"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

const keptAndTried = "they are kept and tried again"

// The first failure is in the log and in the status when the call that hit it returns, whichever call that is. The
// failure is over only when everything is home. Then the bytes arrive soon, however long the interval is.
func TestFailureOfWriteBackIsKnownAtOnce(t *testing.T) {
	var log logbook
	m := newMachine(t, 1, logTo(&log))
	src := m.file(4 * page.Size)
	p := m.run(src, 0, 0, 4*page.Size, true)
	for i := range 4 {
		p.store(i*page.Size, byte('a'+i))
	}
	p.release()
	require.Equal(t, []Waiting{{File: "file", Bytes: 4 * page.Size}}, m.cache.Waiting())
	src.home.failFrom(page.Size, syscall.ENOSPC)
	require.ErrorIs(t, src.attached.ChangeHome(context.Background(), Change{Off: 2 * page.Size, Len: 1},
		func(int64, int64) error { return nil }), syscall.ENOSPC)
	require.Equal(t, 1, strings.Count(log.String(), keptAndTried), log.String())
	require.Contains(t, log.String(), "bytes=16384")
	status := m.cache.Status().Files[0]
	require.Contains(t, status.Error, "no space left")
	require.Equal(t, int64(4*page.Size), status.WaitingBytes)

	// One page arrives. This does not end the failure.
	require.NoError(t, src.attached.ChangeHome(context.Background(), Change{Off: 0, Len: 1},
		func(int64, int64) error { return nil }))
	require.NotEmpty(t, m.cache.Status().Files[0].Error)
	require.Error(t, m.cache.Flush(context.Background()))
	require.Equal(t, 1, strings.Count(log.String(), keptAndTried), "said once")
	require.Contains(t, m.cache.Waiting()[0].Error, "no space left")

	src.home.fail(nil)
	require.Eventually(t, func() bool { return len(m.cache.Waiting()) == 0 }, time.Minute, time.Millisecond)
	require.Equal(t, byte('d'), src.home.bytes(3*page.Size, 1)[0])
	require.Contains(t, log.String(), "written back again")
	require.Empty(t, m.cache.Status().Files[0].Error)
	p.unmap()
}

// Home was changed directly, and cannot be read for a while, so nothing may be written over it. Once it can be read,
// the bytes arrive without a request.
func TestCollectIsTriedAgainWhenHomeCannotBeRead(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 'x')
	p.release()
	src.home.editAt(1, []byte("y"))
	src.home.failReads(syscall.EIO)
	require.ErrorIs(t, m.cache.Flush(context.Background()), syscall.EIO)
	require.NotEmpty(t, m.cache.Waiting()[0].Error)
	src.home.failReads(nil)
	require.Eventually(t, func() bool { return len(m.cache.Waiting()) == 0 }, patient, time.Millisecond)
	require.Equal(t, []byte("xy"), src.home.bytes(0, 2))
	p.unmap()
}

// A part that home refuses keeps no other part from coming home.
func TestFlushPassesOverWhatFails(t *testing.T) {
	m := newMachine(t, 1)
	const pages = 3 * collectPortion
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	p.store(0, 'x')
	p.store(2*collectPortion*page.Size, 'y')
	p.release()
	src.home.mu.Lock()
	src.home.werr, src.home.werrAt, src.home.werrEnd = syscall.EIO, 0, page.Size
	src.home.mu.Unlock()
	require.ErrorIs(t, m.cache.Flush(context.Background()), syscall.EIO)
	require.Equal(t, byte('y'), src.home.bytes(2*collectPortion*page.Size, 1)[0])
	require.Equal(t, int64(page.Size), m.cache.Waiting()[0].Bytes)
	src.home.fail(nil)
	require.NoError(t, m.cache.Flush(context.Background()))
	p.unmap()
}

// When the last mapping ends, everything comes home at once, however long the interval is.
func TestUnusedCacheIsCollected(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 'x')
	p.unmap()
	require.Eventually(t, func() bool { return len(m.cache.Waiting()) == 0 }, time.Minute, time.Millisecond)
	require.Equal(t, byte('x'), src.home.bytes(0, 1)[0])
}

// The hold lasts exactly as long as bytes wait.
func TestHoldLastsWhileBytesWait(t *testing.T) {
	var mu sync.Mutex
	begun, held := 0, 0
	atOnce := make(chan struct{})
	close(atOnce)
	m := newMachine(t, 2, func(o *Options, _ *int64) {
		o.Hold = func() (<-chan struct{}, func()) {
			mu.Lock()
			defer mu.Unlock()
			begun++
			held++
			return atOnce, func() {
				mu.Lock()
				defer mu.Unlock()
				held--
			}
		}
	})
	holds := func() [2]int {
		mu.Lock()
		defer mu.Unlock()
		return [2]int{begun, held}
	}
	a, b := m.file(page.Size), m.file(page.Size)
	p, q := m.run(a, 0, 0, page.Size, true), m.run(b, 1, 0, page.Size, true)
	p.release()
	require.Equal(t, [2]int{0, 0}, holds(), "nothing was stored")
	p.store(0, 1)
	p.release()
	q.store(0, 1)
	q.release()
	require.Equal(t, [2]int{1, 1}, holds())
	require.NoError(t, a.attached.Sync(context.Background(), nil))
	require.Equal(t, [2]int{1, 1}, holds())
	b.home.fail(syscall.EROFS)
	require.Error(t, m.cache.Flush(context.Background()))
	require.Equal(t, [2]int{1, 1}, holds())
	b.home.fail(nil)
	require.NoError(t, m.cache.Flush(context.Background()))
	require.Equal(t, [2]int{1, 0}, holds())
	p.store(0, 2)
	p.release()
	p.unmap()
	require.Equal(t, [2]int{2, 1}, holds())
	m.cache.Forget(a.id)
	require.Equal(t, [2]int{2, 0}, holds(), "nobody misses the bytes of an unlinked file")
	q.unmap()
}

// A hold that cannot begin, for example because the path to the mountpoint hangs, delays releases only briefly, and
// does not delay bytes on their way home.
func TestHoldThatDoesNotBegin(t *testing.T) {
	ended := make(chan struct{}, 10)
	m := newMachine(t, 1, func(o *Options, _ *int64) {
		o.Hold = func() (<-chan struct{}, func()) { return make(chan struct{}), func() { ended <- struct{}{} } }
	})
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	p.release()
	require.NoError(t, m.cache.Flush(context.Background()))
	<-ended
	p.unmap()
}
