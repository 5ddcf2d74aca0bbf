package kernel

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// testFile is a file of four pages. A device stores into the first two.
type testFile struct {
	lrc.File
	mu       testLock
	size     int64
	dropped  []page.Range
	sentFrom []int64
	// meanwhile is called while the kernel drops pages.
	meanwhile func()
	outrun    int
}

type testLock struct{ sync.Mutex }

func (l *testLock) LockIn(ctx context.Context) error {
	l.Lock()
	return nil
}

func (f *testFile) Size() int64                          { return f.size }
func (f *testFile) Outrun()                              { f.outrun++ }
func (f *testFile) Dropped(int, time.Duration)           {}
func (f *testFile) NotDropped(page.Range, error)         {}
func (f *testFile) Push(int64, []byte, func() bool) bool { return false }

// Invalidate fails the test if the file is locked: it would hang.
func (f *testFile) Invalidate(off, n int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropped = append(f.dropped, page.Covering(off, n))
	if f.meanwhile != nil {
		f.meanwhile()
	}
	return nil
}

func (f *testFile) SendFrom(off int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sentFrom = append(f.sentFrom, off)
	return nil
}

var (
	gpu   = versions.GPU(0)
	whole = page.Range{End: 4}
	both  = page.Range{End: 2}
)

// newKernel returns a Kernel that has read the pages of a file, which a device then tracks.
func newKernel(cachesWrites bool) (*testFile, *Kernel) {
	f := &testFile{size: 4 * page.Size}
	f.HeldUnasked = cachesWrites
	plan := f.BeginAcquire(whole, gpu)
	plan.Updated([]page.Range{whole}, true)
	plan.End()
	return f, New(&f.mu, f, f, cachesWrites)
}

func TestReleasesEndWhenTheKernelHasDroppedTheirPages(t *testing.T) {
	f, k := newKernel(false)
	f.CPURead(both)
	f.mu.Lock()
	drain := f.BeginRelease([]page.Range{both}, both, gpu).Commit()
	require.Equal(t, []page.Range{both}, drain.Pages)
	var end <-chan struct{}
	f.meanwhile = func() {
		f.meanwhile = nil
		require.Len(t, k.Ends(both), 1)
		require.Empty(t, k.Ends(page.Range{Start: 2, End: 4}))
		end = k.Ends(both)[0]
		f.BeginWrite(page.Range{End: 1}).Commit(page.Range{End: 1}) // the kernel has the page again
		f.meanwhile = func() {
			select {
			case <-end:
				t.Error("the wait ended before the kernel dropped the page that came back")
			default:
			}
		}
	}
	k.Drop(drain)
	require.Empty(t, k.Ends(both))
	f.mu.Unlock()
	<-end // those who wait for the release wait for the page that came back, too
	require.NoError(t, k.Await(context.Background(), both))
	require.Equal(t, []page.Range{both, {End: 1}}, f.dropped, "the page that came back is dropped again")
	require.Zero(t, f.outrun)
}

func TestAReleaseGivesUpIfPagesKeepComingBack(t *testing.T) {
	f, k := newKernel(false)
	f.CPURead(both)
	f.mu.Lock()
	drain := f.BeginRelease([]page.Range{both}, both, gpu).Commit()
	f.meanwhile = func() { f.BeginWrite(both).Commit(both) }
	k.Drop(drain)
	f.mu.Unlock()
	require.Equal(t, 1, f.outrun)
	require.Len(t, f.dropped, maxRedrops+1)
}

func TestOnlyStoresIntoMergedPagesGoHome(t *testing.T) {
	f, k := newKernel(false)
	f.mu.Lock()
	f.BeginRelease([]page.Range{both}, both, gpu).Commit()
	f.CPURead(both)
	given := bytes.Repeat([]byte{1}, 2*page.Size)
	var later func()
	k.GetsMerged(both, given, func(do func()) { later = do })
	require.True(t, k.HasMerged())

	sent := bytes.Clone(given)
	sent[5] = 9 // a program stores
	home := func(p []byte, off int64) (int, error) { return copy(p, bytes.Repeat([]byte{2}, len(p))), nil }
	store := func() []byte {
		got, err := k.StoresOnly(0, sent, home)
		require.NoError(t, err)
		return got
	}
	want := bytes.Repeat([]byte{2}, 2*page.Size)
	want[5] = 9
	require.Equal(t, want, store())
	require.Equal(t, byte(1), sent[4], "what the kernel sent stays")

	k.Sends(0, sent)
	sent[7] = 8
	want[5], want[7] = 2, 8
	require.Equal(t, want, store(), "the first store was sent already")
	k.Zeroes(page.Bytes{Off: 7, End: 8})
	sent[7] = 0
	want[7] = 2
	require.Equal(t, want, store(), "the kernel's copy has the zero")
	k.Reads(page.Range{End: 1})
	require.Equal(t, sent[:page.Size], store()[:page.Size], "the kernel read the page anew")
	require.True(t, k.HasMerged(), "the second page")
	f.mu.Unlock()
	later()
	require.False(t, k.HasMerged())
	require.Equal(t, []page.Range{both}, f.dropped)
	require.Empty(t, k.Ends(both))
}

func TestTheKernelMayKnowALongerFile(t *testing.T) {
	_, k := newKernel(false)
	require.False(t, k.MayBeLonger(), "a kernel that caches no writes")
	f, k := newKernel(true)
	f.size = 100
	require.True(t, k.MayBeLonger(), "programs may be writing already")
	require.NoError(t, k.SendGrowth(context.Background()))
	require.Equal(t, []int64{100}, f.sentFrom)
	require.False(t, k.MayBeLonger())
	k.MayExtend()
	require.True(t, k.MayBeLonger())
}
