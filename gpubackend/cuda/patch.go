package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
)

const (
	// patchSize is the bytes that the kernel is given of each page, and pairSize those of each of its granules: as it was, and
	// as it is to be. All that was of a page comes before what is to be.
	patchSize = 48
	pairSize  = 2 * gpubackend.GranuleSize
)

// patchWork is a page with something to store.
type patchWork struct {
	*gpubackend.Patch
	changed gpubackend.Granules
	first   int // its pairs come after so many of others in the round
	pairs   int
}

// Patch uploads what differs between the versions of each page and has a kernel store the bytes that do, one by one.
func (d *device) Patch(ctx context.Context, patches []gpubackend.Patch) error {
	done, err := d.use(len(patches), func(i int) (*memory, error) {
		p := &patches[i]
		if len(p.Base) != pageSize || len(p.Next) != pageSize {
			return nil, fmt.Errorf("%w: patch of a page from %d to %d bytes", gpubackend.ErrRange, len(p.Base), len(p.Next))
		}
		return d.ownPages(p.Mem, p.Off, 1)
	})
	if err != nil {
		return err
	}
	defer done()
	work := patchesOf(patches)
	if len(work) == 0 {
		return errors.Join(d.lost(), ctx.Err())
	}
	return d.run(ctx, d.workLane, func() error {
		for len(work) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := numberPairs(work)
			if err := d.worker.patchPages(work[:n]); err != nil {
				return err
			}
			work = work[n:]
		}
		return nil
	})
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

// numberPairs returns how many of the patches go into one round, and numbers their pairs.
func numberPairs(work []patchWork) int {
	size, pairs := 0, 0
	for i := range work {
		w := &work[i]
		if size += patchSize + w.pairs*pairSize; size > upSize {
			return i
		}
		w.first = pairs
		pairs += w.pairs
	}
	return len(work)
}

// patchPages does one round of patches.
func (w *worker) patchPages(work []patchWork) error {
	p := w.host.bytes()
	pairsAt := len(work) * patchSize
	last := &work[len(work)-1]
	size := (last.first + last.pairs) * pairSize
	inParallel(len(work), size, func(i int) {
		x := &work[i]
		putWords(p[i*patchSize:], uint64(x.Mem.(*memory).base+address(x.Off)), x.changed[0], x.changed[1], x.changed[2], x.changed[3], uint64(x.first))
		was := p[pairsAt+x.first*pairSize:][:x.pairs*pairSize]
		next := was[x.pairs*gpubackend.GranuleSize:]
		x.changed.Each(func(from, to int) {
			was = was[copy(was, x.Base[from:to]):]
			next = next[copy(next, x.Next[from:to]):]
		})
	})
	err := w.up(0, pairsAt+size)
	if err == nil {
		err = w.launch(w.patch, uint32(len(work)), uint64(w.dev), uint64(w.dev+address(pairsAt)))
	}
	return w.finish(err)
}
