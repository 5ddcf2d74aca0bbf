package cost

import "time"

const (
	// unit is the size of a read that corrects latency and bandwidth equally.
	unit = 64 << 10
	// gain is the part of an error that one read corrects. quickGain is the part for a read that took less than half of
	// the estimate: a place that has become faster should be used soon.
	gain, quickGain = 0.25, 0.5
	// rateGain is the weight of the last read in Estimate.Rate.
	rateGain = 1. / 16
	// surprise limits the time of a read to this multiple of the estimate.
	surprise = 16
	// least is the smallest latency, and the smallest time of a unit, in nanoseconds.
	least = 10

	// A place is due some time after its last measurement: after dueAfter, or after dueTimes the time of a unit there,
	// whichever is longer.
	dueAfter = 20 * time.Millisecond
	dueTimes = 20
)

// Source is the estimate for one place. Calls must not overlap.
type Source struct {
	latency  float64 // ns
	perUnit  float64 // ns
	queued   int64   // bytes under way
	reads    int     // reads under way
	cells    [sizeClasses][loadClasses]cell
	apart    [sizeClasses]cell // for reads for which nobody waited
	stuck    int
	probing  bool
	measured time.Time
	ended    int64
	// bytes and took are moving averages over ended reads: the bytes of a read plus those under way before it, and ns.
	bytes, took float64
}

// NewSource makes a Source with this estimate to start from. bandwidth is in bytes per second.
func NewSource(latency time.Duration, bandwidth float64) *Source {
	return &Source{latency: float64(latency), perUnit: unit / bandwidth * 1e9}
}

// Ahead is what was under way when a read began.
type Ahead struct {
	Bytes int64
	Reads int
}

// Begin records that a read of n bytes begins.
func (s *Source) Begin(n int64) (ahead Ahead) {
	ahead = Ahead{s.queued, s.reads}
	s.queued += n
	s.reads++
	return ahead
}

// End records that a read of n bytes took this long, including the wait for what was ahead of it. apart says that
// nobody waited for it. The time of such a read shows when a place changes, but not how long readers wait.
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
	// If one of them is at its minimum, the other one takes the rest of the correction.
	s.perUnit = max(s.perUnit+err*u/(1+u*u), least)
	s.latency = max(thought+err-u*s.perUnit, least)
	s.perUnit = max((thought+err-s.latency)/u, least)
}

// Cancel records that a read of n bytes ended without a measurement: it failed, or never began.
func (s *Source) Cancel(n int64) { s.queued, s.reads = s.queued-n, s.reads-1 }

// Abandon records that the caller of a read no longer waits for it. Answer records that such a read has ended.
func (s *Source) Abandon() { s.stuck++ }

// Answer ends what Abandon began.
func (s *Source) Answer() { s.stuck-- }

// Stuck reports whether an abandoned read has not ended yet.
func (s *Source) Stuck() bool { return s.stuck > 0 }

// Time estimates the duration of a read of n bytes that begins now. It is 0 for no bytes.
func (s *Source) Time(n int64) time.Duration {
	if n <= 0 {
		return 0
	}
	size, load := classOf(n, s.reads)
	if c := &s.cells[size][load]; c.count > 0 {
		// The measured mean counts. Latency and bandwidth only adjust it to the size of this read.
		alone := func(n float64) float64 { return s.latency + n/unit*s.perUnit }
		return time.Duration(float64(c.mean) * alone(float64(n)) / alone(float64(c.bytes)))
	}
	return time.Duration(s.latency + float64(s.queued+n)/unit*s.perUnit)
}

// Due reports whether it is time to measure the place again. If so, the caller must do it: the place is not due again
// until Measured.
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

// Estimate is a Source's present estimate.
type Estimate struct {
	Latency time.Duration
	// Bandwidth is in bytes per second, as far as the reads distinguish it from Latency. Rate is the rate of the last
	// reads, including their latency; 0 if there were none.
	Bandwidth, Rate float64
	// Queued is the number of bytes under way, Reads the number of measured reads.
	Queued, Reads int64
	Stuck         bool
}

// Estimate returns the present estimate.
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
