package pagecache

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// heapBeside is how large Go's heap may grow besides what it holds in use before garbage is collected without waiting for as much
	// garbage as that.
	heapBeside = 64 << 20
	// heapLook is how often the limit is set anew.
	heapLook = time.Second
)

// BoundHeap keeps garbage in the process from taking more than a share of hostMemory and heapBeside, until ctx ends. It is for the
// process of a daemon: the limit of Go's heap follows what is in use there, so that a large heap is not collected all the time.
func BoundHeap(ctx context.Context, hostMemory int64) {
	tick := time.NewTicker(heapLook)
	defer tick.Stop()
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	for {
		live := heapLive()
		debug.SetMemoryLimit(min(before, live+live/4+hostMemory/4+heapBeside))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
