package home

import (
	"log/slog"
	"math"
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Mount is what the homes of a mount share.
type Mount struct {
	Log *slog.Logger // immutable
	// Buffered reads home through the host's page cache even if it could be read past it. Immutable.
	Buffered bool
	// LeastParallel is the size in bytes from which on adjacent runs are written by several cores: see
	// LeastParallelFor. Immutable, except in tests.
	LeastParallel int64
	// Reads counts reads past the host's page cache, and locked pages that are being unlocked. Both go on without a
	// file's lock.
	Reads sync.WaitGroup

	mu sync.Mutex
	// ways is keyed by the device number of the filesystem. Guarded by mu.
	ways map[uint64]*mover.ColdWay
	// reasons say why files are read through the host's page cache although Buffered is not set. Guarded by mu.
	reasons []string
}

// LeastParallelFor returns LeastParallel for a machine with so many cores.
func LeastParallelFor(cores int) int64 {
	if cores < parallelCores {
		return math.MaxInt64
	}
	return LeastParallel
}

// coldWay returns the measurements of the disk of a filesystem.
func (m *Mount) coldWay(dev uint64) *mover.ColdWay {
	m.mu.Lock()
	defer m.mu.Unlock()
	way := m.ways[dev]
	if way == nil {
		if m.ways == nil {
			m.ways = make(map[uint64]*mover.ColdWay)
		}
		way = new(mover.ColdWay)
		m.ways[dev] = way
	}
	return way
}

// noDirect logs a reason why files are read through the host's page cache, once per reason.
func (m *Mount) noDirect(reason string) {
	m.mu.Lock()
	known := slices.Contains(m.reasons, reason)
	if !known {
		m.reasons = append(m.reasons, reason)
	}
	m.mu.Unlock()
	if !known {
		m.Log.Info("devices read files through the host's page cache", "reason", reason)
	}
}

// NoDirect returns the reasons why files are read through the host's page cache.
func (m *Mount) NoDirect() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string{}, m.reasons...)
}
