package pagecache

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/cleanread"
)

// Counters count events since the mount began, for one file or for the whole mount. Pages are of page.Size bytes.
type Counters struct {
	Maps, Acquires, Releases, ReleasedPages          atomic.Int64
	Fills, FilledPages, RefreshedPages, PatchedPages atomic.Int64
	// LockedPages counts pages of home that devices copied from where they are locked, the others those that were read
	// from the host's page cache, past it, and through it.
	LockedPages, CachedPages, DirectPages, BufferedPages atomic.Int64
	PrefetchedPages                                      atomic.Int64
	// ViewPages counts pages of files that were copied to views.
	ViewPages                            atomic.Int64
	CollectingReads, CollectingReadPages atomic.Int64
	// FlightPages counts pages that CPU reads could get before home had them. FlightReads counts the reads that got
	// some.
	FlightPages, FlightReads, FlightReadBytes atomic.Int64
	PeerCopies, PeerCopyPages                 atomic.Int64
	Collects, CollectedPages, MergedPages     atomic.Int64
	// ParallelPages counts pages that several cores wrote home together.
	ParallelPages                                         atomic.Int64
	OverlappingBytes, Invalidations, Evictions, LostPages atomic.Int64
	HomeReplacements, BaselessPages, PastEndPages         atomic.Int64
	WriteBackFailures                                     atomic.Int64
	// Brackets counts brackets that used the file. MovedOut counts extents moved to pinned host memory, MovedIn those
	// moved back. RoundTrips counts extents of MovedIn, and extents that were created again after an eviction.
	Brackets, MovedOut, MovedIn, RoundTrips atomic.Int64
	// CPU reads of bytes that home has.
	cleanread.Counters
	// Bases is a gauge: base copies held now.
	Bases atomic.Int64

	// Latencies are kept for the whole mount only.
	FillTime, CollectTime, ReleaseTime, CollectingReadTime, InvalidateTime Histogram
}

// count applies fn to the counters of the file and of the mount.
func (f *File) count(fn func(c *Counters)) {
	fn(&f.counters)
	fn(&f.c.counters)
}

// histogramBuckets covers 1 µs to over an hour in powers of two.
const histogramBuckets = 33

// Histogram counts durations in buckets whose bounds are powers of two of microseconds.
type Histogram struct {
	buckets [histogramBuckets]atomic.Int64
	sum     atomic.Int64 // ns
}

// Observe counts a duration.
func (h *Histogram) Observe(d time.Duration) {
	h.buckets[min(bits.Len64(uint64(max(d, 0)/time.Microsecond)), histogramBuckets-1)].Add(1)
	h.sum.Add(int64(d))
}

// Latency is a Histogram at one moment.
type Latency struct {
	Count int64 `json:"count"`
	// Mean, P50, P99 and Max are in microseconds. All but Mean are the upper bound of their bucket.
	Mean float64 `json:"mean_us"`
	P50  int64   `json:"p50_us"`
	P99  int64   `json:"p99_us"`
	Max  int64   `json:"max_us"`
	// Buckets[i] counts durations of at least 2^(i-1) µs and below 2^i µs. The first bucket also counts shorter ones,
	// the last one longer ones. Trailing zeros are left out.
	Buckets []int64 `json:"buckets"`
}

// Snapshot returns the current state.
func (h *Histogram) Snapshot() Latency {
	l := Latency{Buckets: []int64{}}
	last := 0
	var counts [histogramBuckets]int64
	for i := range counts {
		counts[i] = h.buckets[i].Load()
		l.Count += counts[i]
		if counts[i] > 0 {
			last = i + 1
		}
	}
	l.Buckets = append(l.Buckets, counts[:last]...)
	if l.Count == 0 {
		return l
	}
	l.Mean = float64(h.sum.Load()) / float64(l.Count) / 1e3
	quantile := func(rank int64) int64 {
		for i, n := range counts {
			if rank -= n; rank <= 0 {
				return 1 << i
			}
		}
		return 1 << (histogramBuckets - 1)
	}
	l.P50, l.P99, l.Max = quantile((l.Count+1)/2), quantile(l.Count-l.Count/100), quantile(l.Count)
	return l
}
