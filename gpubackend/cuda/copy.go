package cuda

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// zeroSize is the number of bytes that are zeroed between two checks of the context.
const zeroSize = 4 << 30

func (d *device) copyPieces(ctx context.Context, by copiers, toHost bool, pieces []gpubackend.Copy) error {
	done, err := d.use(len(pieces), func(i int) (*memory, error) {
		if err := pieces[i].Check(); err != nil {
			return nil, err
		}
		return d.own(pieces[i].Mem, pieces[i].Off, pieces[i].Bytes())
	})
	if err != nil {
		return err
	}
	defer done()
	small, others := splitScattered(pieces)
	var moves []move
	if len(small) > 0 {
		if moves, err = d.scatterPieces(ctx, small, toHost); err != nil {
			return err
		}
	}
	moves = slices.Grow(moves, len(others))
	var look lookup
	for i := range others {
		p := &others[i]
		if p.Row > 0 {
			moves = cutRows(moves, &look, p)
			continue
		}
		m := p.Mem.(*memory)
		moves = cut(moves, &look, move{mem: m, dev: m.base + address(p.Off), host: p.Host})
	}
	if len(moves) == 0 {
		return ctx.Err()
	}
	return d.copyBy(ctx, by, func(c *copier) error { return c.run(ctx, moves) })
}

// copyBy runs f as a job of an idle copier. It waits for one until ctx ends.
func (d *device) copyBy(ctx context.Context, by copiers, f func(c *copier) error) error {
	c, err := receive(ctx, by, nil)
	if err != nil {
		return err
	}
	defer func() { by <- c }()
	return d.run(ctx, c.lane, func() error { return f(c) })
}

// CopyIn writes whole words and more at a time. It is not for pages that another process may be storing into: use Patch
// there.
func (d *device) CopyIn(ctx context.Context, pieces []gpubackend.Copy) error {
	return d.copyPieces(ctx, d.in, false, pieces)
}

// CopyOut reads memory that other processes may be storing into. Each byte is one that the memory had during the call;
// two bytes may be from different moments.
func (d *device) CopyOut(ctx context.Context, pieces []gpubackend.Copy) error {
	return d.copyPieces(ctx, d.out, true, pieces)
}

func (d *device) Zero(ctx context.Context, mem gpubackend.Memory, off, n int64) error {
	done, err := d.use(1, func(int) (*memory, error) { return d.own(mem, off, n) })
	if err != nil {
		return err
	}
	defer done()
	if n == 0 {
		return ctx.Err()
	}
	base := mem.(*memory).base + address(off)
	return d.run(ctx, d.workLane, func() error { return d.worker.zero(ctx, base, n) })
}
