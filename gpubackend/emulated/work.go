package emulated

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// pieceSize is the number of bytes between two checks of the context, and the least that is worth a goroutine.
const pieceSize = 1 << 20

// inPieces calls do for the pieces 0 to n-1, on several goroutines if there is more than one piece, and returns when
// all calls have ended. When ctx ends, it begins no further piece, and returns the error of ctx.
func inPieces(ctx context.Context, n int, do func(piece int)) error {
	if n == 1 && ctx.Err() == nil {
		do(0)
		return ctx.Err()
	}
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

// use lets a call into the memories that own returns for 0 to n-1, each as often as it is returned.
func (d *device) use(n int, own func(i int) (*memory, error)) (done func(), err error) {
	if d.isClosed() {
		return nil, gpubackend.ErrClosed
	}
	used := make([]*memory, 0, n)
	done = func() {
		for _, m := range used {
			m.users.End()
		}
	}
	for i := range n {
		m, err := own(i)
		if err == nil && (len(used) == 0 || used[len(used)-1] != m) {
			if err = m.users.Begin(); err == nil {
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
