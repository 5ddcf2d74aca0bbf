package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
)

const (
	// patchSize is the number of bytes that the kernel gets for each page, and pairSize for each of its granules: the
	// old and the new bytes. All old granules of a page come before the new ones.
	patchSize = 48
	pairSize  = 2 * gpubackend.GranuleSize
)

// patchWork is a page with something to store.
type patchWork struct {
	*gpubackend.Patch
	changed gpubackend.Granules
	first   int // the number of pairs in the round before its own
	pairs   int
}

// Patch lets a kernel store the bytes that differ, one by one. For a page with an agreed digest it uploads the new
// page, and the kernel finds the differences. For other pages, and for pages that have another digest, it uploads the
// differences between both versions.
func (d *device) Patch(ctx context.Context, patches []gpubackend.Patch) error {
	done, err := d.use(len(patches), func(i int) (*memory, error) {
		p := &patches[i]
		if len(p.Base) != pageSize || len(p.Next) != pageSize {
			return nil, fmt.Errorf("%w: patch of a page from %d to %d bytes", gpubackend.ErrRange, len(p.Base),
				len(p.Next))
		}
		return d.ownPages(p.Mem, p.Off, 1)
	})
	if err != nil {
		return err
	}
	defer done()
	known, patches := d.splitKnown(patches)
	work := patchesOf(patches)
	if len(known)+len(work) == 0 {
		return errors.Join(d.lost(), ctx.Err())
	}
	return d.run(ctx, d.workLane, func() error {
		refused, err := d.worker.refreshAll(ctx, known)
		if err != nil {
			return err
		}
		return d.worker.patchAll(ctx, append(work, patchesOf(refused)...))
	})
}

// halfUp is the upload memory of one round of patches: half of it, so that the host fills one half while the other is
// under way.
const halfUp = upSize / 2

// patchAll does the patches, a round at a time, in the worker's lane. Even with an error, it returns only when nothing
// is under way.
func (w *worker) patchAll(ctx context.Context, work []patchWork) error {
	var err error
	for turn := 0; len(work) > 0 && err == nil; turn++ {
		half := turn % 2
		if turn > 1 {
			err = w.lane.drv.wait(w.halves[half]) // its bytes are the host's again
		}
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			n := numberPairs(work)
			if err = w.patchPages(half*halfUp, work[:n]); err == nil {
				err = w.lane.drv.check("cuEventRecord", w.lane.drv.eventRecord(w.halves[half], w.lane.stream))
			}
			work = work[n:]
		}
	}
	return w.finish(err)
}

// patchesOf returns the patches that have something to store.
func patchesOf(patches []gpubackend.Patch) []patchWork {
	work := make([]patchWork, len(patches))
	unknown := 0
	for i := range patches {
		work[i] = patchWork{Patch: &patches[i], changed: patches[i].Changed}
		if work[i].changed == (gpubackend.Granules{}) {
			unknown++
		}
	}
	if unknown > 0 {
		inParallel(len(work), unknown*2*pageSize, func(i int) { work[i].changed = work[i].Differing() })
	}
	n := 0
	for _, w := range work {
		if w.pairs = w.changed.Count(); w.pairs > 0 {
			work[n] = w
			n++
		}
	}
	return work[:n]
}

// numberPairs returns how many of the patches fit into one round, and numbers their pairs.
func numberPairs(work []patchWork) int {
	size, pairs := 0, 0
	for i := range work {
		w := &work[i]
		if size += patchSize + w.pairs*pairSize; size > halfUp {
			return i
		}
		w.first = pairs
		pairs += w.pairs
	}
	return len(work)
}

// patchPages queues one round of patches. Its memory begins at at.
func (w *worker) patchPages(at int, work []patchWork) error {
	p := w.host.bytes()[at : at+halfUp]
	pairsAt := len(work) * patchSize
	last := &work[len(work)-1]
	size := (last.first + last.pairs) * pairSize
	inParallel(len(work), size, func(i int) {
		x := &work[i]
		putWords(p[i*patchSize:], uint64(x.Mem.(*memory).base+address(x.Off)), x.changed[0], x.changed[1], x.changed[2],
			x.changed[3], uint64(x.first))
		was := p[pairsAt+x.first*pairSize:][:x.pairs*pairSize]
		next := was[x.pairs*gpubackend.GranuleSize:]
		x.changed.Each(func(from, to int) {
			was = was[copy(was, x.Base[from:to]):]
			next = next[copy(next, x.Next[from:to]):]
		})
	})
	if err := w.up(at, pairsAt+size); err != nil {
		return err
	}
	dev := w.dev + address(at)
	return w.launch(w.patch, uint32(len(work)), uint64(dev), uint64(dev+address(pairsAt)))
}
