package pagecache

import (
	"iter"
	"runtime"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// inParallel calls do for 0 to n-1 on up to so many goroutines, the caller's among them, and returns when all calls have
// ended. After the first error no further one begins, and it is returned. Goroutines that come too late for a call are not
// waited for: to be woken may take them longer than all calls take.
func inParallel(n, goroutines int, do func(i int) error) error {
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

// calls are those of inParallel.
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
const waitSpin = 100 * time.Microsecond

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

// cut yields consecutive parts of rg of at most n pages.
func cut(rg page.Range, n page.Index) iter.Seq[page.Range] {
	return func(yield func(page.Range) bool) {
		for p := rg.Start; p < rg.End; p += n {
			if !yield(page.Range{Start: p, End: min(p+n, rg.End)}) {
				return
			}
		}
	}
}

// joined returns ascending ranges with those joined that follow each other.
func joined(ranges []page.Range) (out []page.Range) {
	for _, rg := range ranges {
		out = page.AppendRange(out, rg)
	}
	return out
}

// intersect returns the pages that are in both a and b, ascending ranges that do not overlap.
func intersect(a, b []page.Range) (out []page.Range) {
	for i, k := 0, 0; i < len(a) && k < len(b); {
		if x := a[i].Intersect(b[k]); !x.Empty() {
			out = append(out, x)
		}
		if a[i].End < b[k].End {
			i++
		} else {
			k++
		}
	}
	return out
}

// subtract returns the pages of a that are not in b, both of them ascending ranges that do not overlap.
func subtract(a, b []page.Range) (out []page.Range) {
	k := 0
	for _, r := range a {
		for k < len(b) && b[k].End <= r.Start {
			k++
		}
		for i := k; i < len(b) && b[i].Start < r.End; i++ {
			if r.Start < b[i].Start {
				out = append(out, page.Range{Start: r.Start, End: b[i].Start})
			}
			r.Start = max(r.Start, b[i].End)
		}
		if !r.Empty() {
			out = append(out, r)
		}
	}
	return out
}
