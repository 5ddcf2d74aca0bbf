package cuda

import (
	"runtime"
	"sync"
	"sync/atomic"
)

const (
	// shareSize is the number of bytes that are worth a goroutine.
	shareSize = 512 << 10
	// fillers is the most goroutines that copy at the same time: a few of them reach the host's memory bandwidth.
	fillers = 8
)

// inParallel calls one for 0 to n-1, and returns when all calls have ended. It uses several cores if the calls copy
// much memory. total is the number of bytes of all calls, which should be of similar size.
func inParallel(n, total int, one func(i int)) {
	workers := min(total/shareSize, runtime.GOMAXPROCS(0), fillers)
	if workers < 2 {
		for i := range n {
			one(i)
		}
		return
	}
	// Several shares for each worker, because cores are not equally busy.
	share := max(1, n/(4*workers))
	var taken atomic.Int64
	var wg sync.WaitGroup
	work := func() {
		for {
			end := int(taken.Add(int64(share)))
			if end-share >= n {
				return
			}
			for i := end - share; i < min(end, n); i++ {
				one(i)
			}
		}
	}
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
