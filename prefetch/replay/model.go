package replay

import (
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Stage is a part of the path from home to where the bytes are used.
type Stage struct {
	// Latency passes before a piece reaches the pipe. Depth is how many pieces can wait that time at once.
	Latency time.Duration
	Depth   int
	// Setup is the pipe's time for a piece of any size. Bandwidth is in bytes a second; 0 means unlimited.
	Setup     time.Duration
	Bandwidth float64
}

// Model is the path of the bytes.
type Model struct {
	Stages []Stage
	// Piece is the largest size of a piece in bytes.
	Piece int64
}

// DefaultModel is an NVMe disk and a GPU behind PCIe 5, with a daemon that spends a few microseconds on each request.
// The link's figures are those of copies of 4 KiB, 64 KiB and 2 MiB on an NVIDIA H200: 1.5, 17 and 51 GB/s.
func DefaultModel() Model {
	return Model{
		Piece: 256 << 10,
		Stages: []Stage{
			{Depth: 1, Setup: 5 * time.Microsecond},                                                     // the daemon
			{Latency: 80 * time.Microsecond, Depth: 128, Setup: 2 * time.Microsecond, Bandwidth: 3.5e9}, // the disk
			{Latency: 5 * time.Microsecond, Depth: 64, Setup: 2600 * time.Nanosecond, Bandwidth: 53e9},  // the link
		},
	}
}

// Check returns an error if the model is invalid.
func (m Model) Check() error {
	if len(m.Stages) == 0 || m.Piece < page.Size {
		return fmt.Errorf("a model needs a stage, and pieces of at least %d bytes", page.Size)
	}
	for i, s := range m.Stages {
		if s.Latency < 0 || s.Setup < 0 || s.Bandwidth < 0 || s.Depth < 1 {
			return fmt.Errorf("stage %d: times and bandwidth must not be negative, and its depth at least 1", i)
		}
		if s.Latency > time.Hour || s.Setup > time.Hour || s.Bandwidth > 0 && s.Bandwidth < 1 || s.Depth > 1<<20 {
			return fmt.Errorf("stage %d: at most an hour, at least a byte a second, and a depth of at most %d", i,
				1<<20)
		}
	}
	return nil
}

// way is a Model in operation.
type way struct {
	model  Model
	stages []pipe
}

type pipe struct {
	free  time.Duration   // when the pipe has carried everything so far
	slots []time.Duration // when each of the last Depth pieces had passed, as a ring: pieces pass in order
	next  int
}

func newWay(m Model) *way {
	w := &way{model: m}
	for _, s := range m.Stages {
		w.stages = append(w.stages, pipe{slots: make([]time.Duration, s.Depth)})
	}
	return w
}

// send sends a piece of n bytes at the time now, and returns when it arrives.
func (w *way) send(now time.Duration, n int64) time.Duration {
	for i, s := range w.model.Stages {
		p := &w.stages[i]
		begin := max(max(now, p.slots[p.next])+s.Latency, p.free)
		now = begin + s.Setup
		if s.Bandwidth > 0 {
			now += time.Duration(float64(n) / s.Bandwidth * float64(time.Second))
		}
		p.free = now
		p.slots[p.next] = now
		p.next = (p.next + 1) % len(p.slots)
	}
	return now
}
