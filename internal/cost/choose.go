package cost

import "time"

// worthSplitting is by how much a read from two places at once must be faster than one from the faster of them.
const worthSplitting = 0.8

// Split says how a read of n bytes is divided between a, which has all or the first most of them, and b, which has them
// all: a gives as many bytes from the beginning as are returned, a multiple of grain, and b the rest, at the same time.
// took is how long that is thought to take. Only a read that is alone is divided. A place that is stuck is left out.
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
	if a.reads > 0 || b.reads > 0 { // others keep both busy, and two requests cost more than one
		return fromA, took
	}
	// Where both would end at once: latency of either, and then each at its own pace.
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
