package pagecache

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// There may be garbage of half of the host memory, but of a quarter and mostGarbage at most, and of leastGarbage in
	// any case: with less, a small daemon would collect it all the time, and a large one needs no more.
	leastGarbage, mostGarbage = 16 << 20, 64 << 20
	// heapLook is how often the limit is set anew.
	heapLook = time.Second
)

// BoundHeap keeps garbage in the process from taking more than garbageOf, until ctx ends. It is for the process
// of a daemon: the limit of Go's heap follows what is in use there, so that a large heap is not collected all the time.
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

// garbageOf is how much garbage there may be beside what is in use. Go waits for as much garbage as is in use where
// that is less.
func garbageOf(live, hostMemory int64) int64 {
	return live/4 + max(leastGarbage, hostMemory/4+min(hostMemory/4, mostGarbage))
}
