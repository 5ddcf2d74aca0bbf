package cost

import "time"

// worthSplitting: a read from two places at once must take less than this part of the time of a read from the faster
// one.
const worthSplitting = 0.8

// Split decides how to divide a read of n bytes between a, which has the first most of them, and b, which has all. a
// reads fromA bytes from the beginning, and b concurrently reads the rest. took is the estimated time. If other reads
// are under way, fromA is 0 or most, rounded down to a multiple of grain unless it is n. Otherwise it may be any
// multiple of grain. Split avoids a place that is stuck, as far as the other one has the bytes.
func Split(a, b *Source, n, most, grain int64) (fromA int64, took time.Duration) {
	most = min(most, n)
	if most < n {
		most -= most % grain
	}
	fromA, took = 0, b.Time(n)
	if most <= 0 || a.Stuck() && !b.Stuck() {
		return fromA, took
	}
	if t := max(a.Time(most), b.Time(n-most)); t < took || b.Stuck() {
		fromA, took = most, t
	}
	if a.reads > 0 || b.reads > 0 { // other reads keep both busy, and two requests cost more than one
		return fromA, took
	}
	// The point at which both end at once: the latency of either, and then each at its own pace.
	wait := float64(b.Time(1)-a.Time(1)) / 1e9 * unit
	pa, pb := a.perUnit/1e9, b.perUnit/1e9
	even := int64((wait + pb*float64(n)) / (pa + pb))
	even -= even % grain
	if even <= 0 || even >= most || b.Stuck() {
		return fromA, took
	}
	if t := max(a.Time(even), b.Time(n-even)); float64(t) < worthSplitting*float64(took) {
		fromA, took = even, t
	}
	return fromA, took
}
