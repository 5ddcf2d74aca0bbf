package cost

import (
	"sync/atomic"
	"time"
)

const (
	// trialShare is the part of what reads take that may be spent on trying places that are thought slower.
	trialShare = 250
	// trialsMost is how much can be saved for that.
	trialsMost = 100 * time.Millisecond
	// trialEvery is how many reads there are for a trial at least.
	trialEvery = 16
)

// Trials decide which of several places a read is asked of: the one where it is thought to take least, but for a trial
// now and then. What was measured of a place that nobody asks is never corrected, and a few reads that took long by
// chance would rule it out for good. A trial of a place that is almost as fast costs almost nothing and comes soon; one
// of a place that is much slower is saved for, by reads of the same size. The zero value has saved nothing. Its methods
// may be called from any goroutine.
type Trials struct {
	saved [sizeClasses]atomic.Int64 // ns
	since [sizeClasses]atomic.Int32 // reads since the last trial
}

// Spent says how long a reader waited for a read of n bytes.
func (t *Trials) Spent(n int64, took time.Duration) {
	size, _ := classOf(n, 0)
	if now := t.saved[size].Add(int64(took / trialShare)); now > int64(trialsMost) {
		t.saved[size].Add(int64(trialsMost) - now)
	}
}

// Pick returns which of the times, of which there is one at least, is to be taken for a read of n bytes.
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
