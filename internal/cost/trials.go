package cost

import (
	"sync/atomic"
	"time"
)

const (
	// trialShare: at most one part in trialShare of the time of reads is spent on trying places that are believed
	// slower.
	trialShare = 250
	// trialsMost is the most that can be saved for trials.
	trialsMost = 100 * time.Millisecond
	// trialEvery is the minimum number of reads between two trials.
	trialEvery = 16
)

// Trials decides which of several places serves a read: the one with the lowest estimated time, except for a trial now
// and then. Without trials, the estimate for a place that nobody asks would never be corrected, and a few slow reads
// would rule it out forever. A trial of a place that is almost as fast costs almost nothing and comes soon. The cost of
// a trial of a much slower place is saved up first, by reads of the same size. The zero value has saved nothing. Its
// methods may be called from any goroutine.
type Trials struct {
	saved [sizeClasses]atomic.Int64 // ns
	since [sizeClasses]atomic.Int32 // reads since the last trial
}

// Spent records how long a reader waited for a read of n bytes.
func (t *Trials) Spent(n int64, took time.Duration) {
	size, _ := classOf(n, 0)
	if now := t.saved[size].Add(int64(took / trialShare)); now > int64(trialsMost) {
		t.saved[size].Add(int64(trialsMost) - now)
	}
}

// Pick returns the index of the place to use for a read of n bytes. times has the estimates, at least one.
func (t *Trials) Pick(n int64, times []time.Duration) (i int) {
	for k := range times {
		if times[k] < times[i] {
			i = k
		}
	}
	size, _ := classOf(n, 0)
	if t.since[size].Add(1) < trialEvery {
		return i
	}
	least, saved := times[i], time.Duration(t.saved[size].Load())
	other := i
	for k := range times {
		if times[k]-least <= saved && times[k] > times[other] {
			other = k
		}
	}
	if other != i {
		t.since[size].Store(0)
		t.saved[size].Add(-int64(times[other] - least))
	}
	return other
}
