package pagecache

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// Garbage may take a quarter of the memory in use, plus half of the host memory. Of the second quarter of the host
	// memory at most mostGarbage counts. The part for the host memory is at least leastGarbage. With less, a small
	// daemon would collect garbage all the time; a large one needs no more.
	leastGarbage, mostGarbage = 16 << 20, 64 << 20
	// heapLook is how often the limit is updated.
	heapLook = time.Second
)

// BoundHeap limits the garbage in the process to garbageOf bytes until ctx ends. It is meant for a daemon process: Go's
// heap limit follows the memory in use, so that a large heap is not collected all the time.
func BoundHeap(ctx context.Context, hostMemory int64) {
	tick := time.NewTicker(heapLook)
	defer tick.Stop()
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	for {
		live := heapLive()
		debug.SetMemoryLimit(min(before, live+garbageOf(live, hostMemory)))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// garbageOf returns how much garbage is allowed in addition to live bytes. Go itself starts a collection when there is
// as much garbage as memory in use; the smaller of the two applies.
func garbageOf(live, hostMemory int64) int64 {
	return live/4 + max(leastGarbage, hostMemory/4+min(hostMemory/4, mostGarbage))
}
