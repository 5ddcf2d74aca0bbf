package emulated

import (
	"context"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// patchesAPiece is the number of patches between two checks of the context.
const patchesAPiece = pieceSize >> page.Shift

func (d *device) Patch(ctx context.Context, patches []gpubackend.Patch) error {
	done, err := d.use(len(patches), func(i int) (*memory, error) {
		p := &patches[i]
		if len(p.Base) != page.Size || len(p.Next) != page.Size {
			return nil, fmt.Errorf("%w: patch of a page from %d to %d bytes", gpubackend.ErrRange, len(p.Base),
				len(p.Next))
		}
		return d.ownPages(p.Mem, p.Off, 1)
	})
	if err != nil {
		return err
	}
	defer done()
	pieces := (len(patches) + patchesAPiece - 1) / patchesAPiece
	return inPieces(ctx, pieces, func(i int) {
		for _, p := range patches[i*patchesAPiece : min((i+1)*patchesAPiece, len(patches))] {
			patch(p.Mem.(*memory).data[p.Off:][:page.Size], &p)
		}
	})
}

// patch is the kernel of Patch. Other processes may be storing into dst. Each byte has its own store behind its own
// branch, so that the compiler cannot join stores of neighbours: a wider store would undo another process's store into
// a neighbour. Base and Next belong to the caller and do not change.
func patch(dst []byte, p *gpubackend.Patch) {
	changed := p.Differing()
	changed.Each(func(from, to int) {
		d, b, next := dst[from:to], p.Base[from:to], p.Next[from:to]
		for j, was := range b {
			if next[j] != was && d[j] == was {
				d[j] = next[j]
			}
		}
	})
}
