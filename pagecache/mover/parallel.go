package mover

import (
	"runtime"
	"sync"
	"time"
)

// InParallel calls do for 0 to n-1 on up to so many goroutines, the caller's among them, and returns when all calls
// have ended. After the first error no further one begins, and it is returned. Goroutines that come too late for a call
// are not waited for: to be woken may take them longer than all calls take.
func InParallel(n, goroutines int, do func(i int) error) error {
	if goroutines = min(n, goroutines, runtime.GOMAXPROCS(0)); goroutines < 2 {
		for i := range n {
			if err := do(i); err != nil {
				return err
			}
		}
		return nil
	}
	c := calls{n: n, do: do, ended: make(chan struct{})}
	for range goroutines - 1 {
		go c.work()
	}
	c.work()
	spinOn(c.ended)
	return c.err
}

// calls are those of InParallel.
type calls struct {
	n     int
	do    func(i int) error
	ended chan struct{} // closed when no call runs and none will

	mu      sync.Mutex
	next    int   // protected by mu; n after an error
	running int   // protected by mu
	err     error // protected by mu until ended; the first
}

func (c *calls) work() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.next < c.n {
		i := c.next
		c.next++
		c.running++
		c.mu.Unlock()
		err := c.do(i)
		c.mu.Lock()
		if err != nil && c.err == nil {
			c.err, c.next = err, c.n
		}
		if c.running--; c.running == 0 && c.next == c.n {
			close(c.ended)
		}
	}
}

// waitSpin is how long spinOn looks again and again, which the last of a few short calls does not outlast.
// BenchmarkHeuristics shows what it gains.
var waitSpin = 100 * time.Microsecond // changed by a benchmark only

// spinLooks is how often spinOn looks before it lets others have the processor: for less than a microsecond.
const spinLooks = 100

// spinOn returns when c is closed. At first it does without being woken.
func spinOn(c <-chan struct{}) {
	for start := time.Now(); time.Since(start) < waitSpin; runtime.Gosched() {
		for range spinLooks {
			select {
			case <-c:
				return
			default:
			}
		}
	}
	<-c
}
