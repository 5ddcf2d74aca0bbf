package cost

import "math/bits"

const (
	// Reads are classified by their size (powers of two from 4 KiB up) and by how many other reads are under way when
	// they begin: none, 1, 2 or 3, 4 to 7, 8 to 15, more.
	sizeClasses, loadClasses = 12, 6
	// steady is the number of readings over which the mean averages out noise.
	steady = 32
	// A place has changed if this many readings in a row are above twice the mean, or below a quarter of it. That many
	// are no coincidence, even if readings scatter as those of a queue do.
	slowerRun, fasterRun = 4, 5
)

// cell holds the measured times of one class of reads.
type cell struct {
	mean  float32 // ns
	bytes float32 // their mean size
	sum   float32 // of the readings in run
	count uint8   // up to steady
	run   int8    // readings in a row far above the mean; negative: far below
}

// classOf returns the class of a read of n bytes that begins while others are under way.
func classOf(n int64, others int) (size, load int) {
	return min(bits.Len64(uint64(max(n-1, 0))>>12), sizeClasses-1), min(bits.Len(uint(others)), loadClasses-1)
}

// note adds a reading. It reports whether the place has changed.
func (c *cell) note(n int64, took float64) (changed bool) {
	if c.count == 0 {
		*c = cell{mean: float32(took), bytes: float32(n), count: 1}
		return false
	}
	switch mean := float64(c.mean); {
	case took > 2*mean:
		c.follow(1, took)
	case took < mean/4:
		c.follow(-1, took)
	default:
		c.run = 0
	}
	if c.run == slowerRun || c.run == -fasterRun {
		n := max(c.run, -c.run)
		c.mean, c.count, c.run = c.sum/float32(n), uint8(n), 0
		return true
	}
	took = min(took, surprise*float64(c.mean))
	c.count = min(c.count+1, steady)
	c.mean += (float32(took) - c.mean) / float32(c.count)
	c.bytes += (float32(n) - c.bytes) / float32(c.count)
	return false
}

// follow counts a reading that is far from the mean in a direction.
func (c *cell) follow(direction int8, took float64) {
	if c.run*direction < 0 {
		c.run = 0
	}
	if c.run == 0 {
		c.sum = 0
	}
	c.run += direction
	c.sum += float32(took)
}
