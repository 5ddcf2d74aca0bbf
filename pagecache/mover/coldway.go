package mover

import (
	"sync"
	"time"
)

const (
	// roundBytes is how much is read one way before the ways are compared again. It is several times what is in flight,
	// so that rounds hardly overlap. The first round of each way has only firstBytes, so that files of a few such
	// rounds gain, too.
	roundBytes = 128 << 20
	firstBytes = 32 << 20
	// retryRounds is after how many rounds the slower way is tried again.
	retryRounds = 32
	// worthThrough is how much faster reads through the page cache must be to be preferred: they cost a copy and some
	// memory.
	worthThrough = 1.1
)

// ColdWay learns by which way a disk delivers bytes faster that the host's page cache lacks: past the page cache, or
// through it with its read-ahead. Disks differ in that, and so do the layers below a virtual disk. Large reads, of
// which many run at once, are counted in rounds. Reads that begin in a round take the same way, except that those of
// blocks of which the page cache has something go past it (ColdFile).
type ColdWay struct {
	mu     sync.Mutex
	now    *round     // the round that reads begin in; protected by mu
	begun  int        // rounds so far; protected by mu
	under  int        // reads in progress; protected by mu
	since  time.Time  // the time before this is counted already; protected by mu
	speeds [2]float64 // past and through the page cache, in bytes per second, 0: not known; protected by mu
}

// round is a number of reads. ColdWay.mu protects its fields, except through and most, which are immutable.
type round struct {
	through bool
	failed  bool
	most    int64 // bytes; the read that reaches this is the last to begin
	bytes   int64
	under   int
	took    time.Duration
}

// begin returns the round of a read of n bytes that begins now. The caller must call end.
func (c *ColdWay) begin(n int64, now time.Time) *round {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.under == 0 {
		c.since = now
	}
	if c.now == nil || c.now.bytes >= c.now.most {
		c.begun++
		c.now = &round{through: c.throughLocked(), most: roundBytes}
		if c.speeds[0] == 0 || c.speeds[1] == 0 {
			c.now.most = firstBytes
		}
	}
	c.under++
	c.now.under++
	c.now.bytes += n
	return c.now
}

// throughLocked chooses the way of a new round.
func (c *ColdWay) throughLocked() bool {
	past, through := c.speeds[0], c.speeds[1]
	if past == 0 || through == 0 {
		return c.begun%2 == 0
	}
	better := through > worthThrough*past
	return better != (c.begun%retryRounds == 0)
}

// end ends a read of a round. The time since the last end of any read is counted for this round.
func (c *ColdWay) end(r *round, now time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.took += now.Sub(c.since)
	c.since = now
	r.failed = r.failed || err != nil
	c.under--
	if r.under--; r.under > 0 || r.bytes < r.most || r.failed || r.took <= 0 {
		return
	}
	speed := &c.speeds[0]
	if r.through {
		speed = &c.speeds[1]
	}
	last := float64(r.bytes) / r.took.Seconds()
	if *speed == 0 {
		*speed = last
	}
	*speed = (*speed + last) / 2
}
