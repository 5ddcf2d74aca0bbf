package mover

import (
	"runtime"
	"sync"
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
	<-c.ended
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
