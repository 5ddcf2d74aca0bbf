package mover

import (
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/internal/cost"
)

// Estimates for a disk and a device before anything is measured.
const (
	diskLatency     = 100 * time.Microsecond
	diskBandwidth   = 2e9
	deviceLatency   = 20 * time.Microsecond
	deviceBandwidth = 10e9
)

// Place measures how long reads from a disk or a device take.
type Place struct {
	mu     sync.Mutex
	source *cost.Source // protected by mu
}

// NewDisk returns the Place of the disk that home is read from.
func NewDisk() *Place { return NewPlace(diskLatency, diskBandwidth) }

// NewPlace returns a Place with estimates until something is measured. bandwidth is in bytes per second.
func NewPlace(latency time.Duration, bandwidth float64) *Place {
	return &Place{source: cost.NewSource(latency, bandwidth)}
}

// do calls fn with the measurements.
func (p *Place) do(fn func(s *cost.Source)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fn(p.source)
}

// Time estimates the duration of a read of n bytes that begins now. It is 0 for no bytes.
func (p *Place) Time(n int64) (t time.Duration) {
	p.do(func(s *cost.Source) { t = s.Time(n) })
	return t
}

// Stuck reports whether a read was given up and has not ended.
func (p *Place) Stuck() (stuck bool) {
	p.do(func(s *cost.Source) { stuck = s.Stuck() })
	return stuck
}

// Estimate returns the present estimate.
func (p *Place) Estimate() (e cost.Estimate) {
	p.do(func(s *cost.Source) { e = s.Estimate() })
	return e
}

// Split is cost.Split for two places. All callers must have the same order of places.
func Split(a, b *Place, n, most, grain int64) (fromA int64, took time.Duration) {
	a.do(func(a *cost.Source) {
		b.do(func(b *cost.Source) { fromA, took = cost.Split(a, b, n, most, grain) })
	})
	return fromA, took
}

// Due reports whether the caller should measure p. Then it must call Measured at the end.
func (p *Place) Due(now time.Time) (due bool) {
	p.do(func(s *cost.Source) { due = s.Due(now) })
	return due
}

// Measured ends a measurement that Due began.
func (p *Place) Measured() { p.do(func(s *cost.Source) { s.Measured(time.Now()) }) }

// begin notes that a read of n bytes begins, and returns what was in progress then.
func (p *Place) begin(n int64) (ahead cost.Ahead) {
	p.do(func(s *cost.Source) { ahead = s.Begin(n) })
	return ahead
}

// end notes the end of a read for which begin returned ahead. apart means that nobody waited for it.
func (p *Place) end(n int64, ahead cost.Ahead, began, now time.Time, apart bool, err error) {
	p.do(func(s *cost.Source) {
		if err != nil {
			s.Cancel(n)
			return
		}
		s.End(n, ahead, now.Sub(began), apart, now)
	})
}

// cancel notes that a read ended, or never began, without being a measurement.
func (p *Place) cancel(n int64) { p.do(func(s *cost.Source) { s.Cancel(n) }) }

// givenUp notes that nobody waits for a read any more, answered that such a read has ended after all.
func (p *Place) givenUp()  { p.do((*cost.Source).Abandon) }
func (p *Place) answered() { p.do((*cost.Source).Answer) }

// Measure carries out a read of n bytes and notes how long it took. apart means that nobody waits for it.
func (p *Place) Measure(n int64, apart bool, read func() error) {
	ahead := p.begin(n)
	began := time.Now()
	err := read()
	p.end(n, ahead, began, time.Now(), apart, err)
}

// Note notes a read of n bytes that has ended.
func (p *Place) Note(n int64, began, ended time.Time) { p.end(n, p.begin(n), began, ended, false, nil) }
