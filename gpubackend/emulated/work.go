package emulated

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// pieceSize is the bytes that are worked on between two looks at the context, and the least that is worth a goroutine.
const pieceSize = 1 << 20

// inPieces calls do for the pieces 0 to n-1, on several goroutines where there is more than one, and returns when all
// of them have ended. When ctx ends no further piece is begun, and its error is returned.
func inPieces(ctx context.Context, n int, do func(piece int)) error {
	var next atomic.Int64
	work := func() {
		for ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= n {
				return
			}
			do(i)
		}
	}
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	return ctx.Err()
}

// use lets a call into the memories that own gives for 0 to n-1, each as often as it is given.
func (d *device) use(n int, own func(i int) (*memory, error)) (done func(), err error) {
	if d.isClosed() {
		return nil, gpubackend.ErrClosed
	}
	used := make([]*memory, 0, n)
	done = func() {
		for _, m := range used {
			m.done()
		}
	}
	for i := range n {
		m, err := own(i)
		if err == nil && (len(used) == 0 || used[len(used)-1] != m) {
			if err = m.use(); err == nil {
				used = append(used, m)
			}
		}
		if err != nil {
			done()
			return nil, err
		}
	}
	return done, nil
}
