package cuda

import (
	"context"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// versionsAt is where the pages of a round of patches are, after the addresses.
const versionsAt = upSize - roundPatches*2*pageSize

// Patch uploads both versions of each page and has a kernel store the bytes that differ, one by one.
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
	if len(patches) == 0 {
		return ctx.Err()
	}
	return d.run(ctx, d.workLane, func() error {
		for len(patches) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(len(patches), roundPatches)
			if err := d.worker.patchPages(patches[:n]); err != nil {
				return err
			}
			patches = patches[n:]
		}
		return nil
	})
}

// patchPages does one round of patches.
func (w *worker) patchPages(patches []gpubackend.Patch) error {
	p := w.host.bytes()
	size := len(patches) * 2 * pageSize
	inParallel(len(patches), size, func(i int) {
		x := &patches[i]
		putWords(p[8*i:], uint64(x.Mem.(*memory).base+address(x.Off)))
		versions := p[versionsAt+i*2*pageSize:]
		copy(versions, x.Base)
		copy(versions[pageSize:], x.Next)
	})
	err := w.up(0, 8*len(patches))
	if err == nil {
		err = w.up(versionsAt, size)
	}
	if err == nil {
		err = w.launch(w.patch, uint32(len(patches)), uint64(w.dev), uint64(w.dev+versionsAt))
	}
	return w.finish(err)
}
