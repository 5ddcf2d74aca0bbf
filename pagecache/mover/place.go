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

// Now returns a copy of the current measurements.
func (p *Place) Now() (s cost.Source) {
	p.do(func(now *cost.Source) { s = *now })
	return s
}

// Due reports whether the caller should measure p. Then it must call Measured at the end.
func (p *Place) Due() (due bool) {
	p.do(func(s *cost.Source) { due = s.Due(time.Now()) })
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

// Note notes a read of n bytes that has ended and took so long.
func (p *Place) Note(n int64, took time.Duration) {
	now := time.Now()
	p.end(n, p.begin(n), now.Add(-took), now, false, nil)
}
