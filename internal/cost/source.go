package cost

import "time"

const (
	// unit is the bytes of a read of which latency and bandwidth are corrected by equal parts.
	unit = 64 << 10
	// gain is the part of an error that is corrected at once, quickGain that of a read that took less than half as long
	// as was thought: what has become faster is to be used soon.
	gain, quickGain = 0.25, 0.5
	// rateGain is the weight of the last read in Estimate.Rate.
	rateGain = 1. / 16
	// surprise is how many times longer than thought a read counts at most.
	surprise = 16
	// least is the smallest latency, and what a unit takes at least, in nanoseconds.
	least = 10

	// A place is due some time after it was measured last: dueAfter, or dueTimes as long as a read of a unit takes
	// there.
	dueAfter = 20 * time.Millisecond
	dueTimes = 20
)

// Source is what is known of one place. Calls must not overlap.
type Source struct {
	latency  float64 // ns
	perUnit  float64 // ns
	queued   int64   // bytes under way
	reads    int     // reads under way
	cells    [sizeClasses][loadClasses]cell
	apart    [sizeClasses]cell // of reads that nobody waited for
	stuck    int
	probing  bool
	measured time.Time
	ended    int64
	// bytes and took are moving averages of what ended: the bytes of a read and those under way before it, and ns.
	bytes, took float64
}

// NewSource makes a Source of which this is thought until something is measured: bandwidth is in bytes per second.
func NewSource(latency time.Duration, bandwidth float64) *Source {
	return &Source{latency: float64(latency), perUnit: unit / bandwidth * 1e9}
}

// Ahead is what was under way when a read began.
type Ahead struct {
	Bytes int64
	Reads int
}

// Begin says that a read of n bytes begins.
func (s *Source) Begin(n int64) (ahead Ahead) {
	ahead = Ahead{s.queued, s.reads}
	s.queued += n
	s.reads++
	return ahead
}

// End says that a read of n bytes ended and took so long, waiting for what was ahead of it included. apart says that
// nobody waited for it: what such a read takes says when a place changes, but not what a reader waits for.
func (s *Source) End(n int64, ahead Ahead, took time.Duration, apart bool, now time.Time) {
	s.queued -= n
	s.reads--
	s.ended++
	s.measured = now
	s.fit(n, ahead.Bytes, took)
	size, load := classOf(n, ahead.Reads)
	c := &s.cells[size][load]
	if apart {
		c = &s.apart[size]
	}
	if c.note(n, float64(took)) {
		now := *c
		s.cells, s.apart = [sizeClasses][loadClasses]cell{}, [sizeClasses]cell{}
		*c = now
	}
}

// fit corrects latency and bandwidth.
func (s *Source) fit(n, ahead int64, took time.Duration) {
	s.bytes += rateGain * (float64(ahead+n) - s.bytes)
	s.took += rateGain * (max(float64(took), least) - s.took)
	u := float64(ahead+n) / unit
	thought := s.latency + u*s.perUnit
	err := min(float64(took), surprise*thought) - thought
	g := gain
	if -err > thought/2 {
		g = quickGain
	}
	err *= g
	// What one of them cannot give, being as small as can be, the other does.
	s.perUnit = max(s.perUnit+err*u/(1+u*u), least)
	s.latency = max(thought+err-u*s.perUnit, least)
	s.perUnit = max((thought+err-s.latency)/u, least)
}

// Cancel says that a read of n bytes ended without saying anything about the place: it failed, or never began.
func (s *Source) Cancel(n int64) { s.queued, s.reads = s.queued-n, s.reads-1 }

// Abandon says that the caller of a read waits no longer for it, Answer that such a read ended after all.
func (s *Source) Abandon() { s.stuck++ }

// Answer ends what Abandon began.
func (s *Source) Answer() { s.stuck-- }

// Stuck reports whether a read that was given up has not ended.
func (s *Source) Stuck() bool { return s.stuck > 0 }

// Time is how long a read of n bytes that begins now is thought to take. Nothing takes no time.
func (s *Source) Time(n int64) time.Duration {
	if n <= 0 {
		return 0
	}
	size, load := classOf(n, s.reads)
	if c := &s.cells[size][load]; c.count > 0 {
		// What was measured counts, and latency and bandwidth only for what is larger or smaller.
		alone := func(n float64) float64 { return s.latency + n/unit*s.perUnit }
		return time.Duration(float64(c.mean) * alone(float64(n)) / alone(float64(c.bytes)))
	}
	return time.Duration(s.latency + float64(s.queued+n)/unit*s.perUnit)
}

// Due reports whether it is time to measure the place again, and if so counts on the caller to do it: it is not due
// again until Measured.
func (s *Source) Due(now time.Time) bool {
	if s.probing || s.stuck > 0 {
		return false
	}
	after := max(dueAfter, dueTimes*time.Duration(s.latency+s.perUnit))
	s.probing = now.Sub(s.measured) > after
	return s.probing
}

// Measured ends what Due began.
func (s *Source) Measured(now time.Time) { s.probing, s.measured = false, now }

// Estimate is what a Source knows.
type Estimate struct {
	Latency time.Duration
	// Bandwidth is in bytes per second, as far as the reads tell it apart from Latency. Rate is what the last reads
	// came to, each with its latency; 0 where there were none.
	Bandwidth, Rate float64
	// Queued is the bytes under way, Reads the number of reads that were measured.
	Queued, Reads int64
	Stuck         bool
}

// Estimate returns what s knows.
func (s *Source) Estimate() Estimate {
	e := Estimate{
		Latency:   time.Duration(s.latency),
		Bandwidth: unit / s.perUnit * 1e9,
		Queued:    s.queued,
		Reads:     s.ended,
		Stuck:     s.Stuck(),
	}
	if s.took > 0 {
		e.Rate = s.bytes / s.took * 1e9
	}
	return e
}
