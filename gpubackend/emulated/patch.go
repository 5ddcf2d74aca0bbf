package emulated

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// patchesAPiece is the patches between two looks at the context.
const patchesAPiece = pieceSize >> page.Shift

func (d *device) Patch(ctx context.Context, patches []gpubackend.Patch) error {
	done, err := d.use(len(patches), func(i int) (*memory, error) {
		p := &patches[i]
		if len(p.Base) != page.Size || len(p.Next) != page.Size {
			return nil, fmt.Errorf("%w: patch of a page from %d to %d bytes", gpubackend.ErrRange, len(p.Base), len(p.Next))
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
			patch(p.Mem.(*memory).data[p.Off:][:page.Size], p.Base, p.Next)
		}
	})
}

// patch is the kernel of Patch. Other processes may be storing into dst. Each byte has a store of its own behind a
// branch of its own, so that the compiler cannot make one store of neighbours: a wider one would bring back what a
// neighbour was before somebody's store. base and next belong to the caller and do not change.
func patch(dst, base, next []byte) {
	for i := 0; i < page.Size; i += 8 {
		if binary.LittleEndian.Uint64(base[i:]) == binary.LittleEndian.Uint64(next[i:]) {
			continue
		}
		d, b, n := dst[i:i+8], base[i:i+8], next[i:i+8]
		for j, was := range b {
			if n[j] != was && d[j] == was {
				d[j] = n[j]
			}
		}
	}
}
