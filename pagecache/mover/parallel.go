package mover

import (
	"runtime"
	"sync"
	"time"
)

// InParallel calls do for 0 to n-1 on up to goroutines goroutines, including the caller's, and returns when all calls
// have ended. After the first error it begins no more calls, and returns that error. It does not wait for goroutines
// that wake up after all calls have begun, because waking up may take longer than all calls.
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

// calls is the state of an InParallel.
type calls struct {
	n     int
	do    func(i int) error
	ended chan struct{} // closed when no call runs and none will

	mu      sync.Mutex
	next    int   // protected by mu; n after an error
	running int   // protected by mu
	err     error // protected by mu until ended; the first error
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

// waitSpin is how long spinOn polls; the last of a few short calls takes less. BenchmarkHeuristics shows the gain.
var waitSpin = 100 * time.Microsecond // only a benchmark changes it

// spinLooks is how often spinOn polls before it yields the processor: for less than a microsecond.
const spinLooks = 100

// spinOn returns when c is closed. At first it polls, which saves the time to be woken.
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
