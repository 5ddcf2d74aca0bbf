package cuda

import (
	"context"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// peerSize is the number of bytes copied from other GPUs between two checks of the context.
const peerSize = 1 << 30

// peerMove is a piece of a copy from another GPU's memory.
type peerMove struct {
	from     *memory
	to, base address
	n        int64
}

// CopyPeer lets the copy engines of this GPU read the others' memory.
func (d *device) CopyPeer(ctx context.Context, pieces []gpubackend.PeerCopy) error {
	done, err := d.use(2*len(pieces), func(i int) (*memory, error) {
		p := &pieces[i/2]
		if i%2 == 0 {
			return d.own(p.Mem, p.Off, p.N)
		}
		return d.peerMemory(p)
	})
	if err != nil {
		return err
	}
	defer done()
	var moves []peerMove
	for _, p := range pieces {
		from := p.From.(*memory)
		for off := int64(0); off < p.N; off += peerSize {
			moves = append(moves, peerMove{
				from: from,
				to:   p.Mem.(*memory).base + address(p.Off+off),
				base: from.base + address(p.FromOff+off),
				n:    min(peerSize, p.N-off),
			})
		}
	}
	if len(moves) == 0 {
		return ctx.Err()
	}
	small, moves := splitPeer(moves)
	if len(small) > 0 {
		left, err := d.scatterPeer(ctx, small)
		if err != nil {
			return err
		}
		if moves = append(moves, left...); len(moves) == 0 {
			return nil
		}
	}
	return d.copyBy(ctx, d.peer, func(c *copier) error {
		if err := d.openAll(moves); err != nil {
			return err
		}
		return c.runPeer(ctx, moves)
	})
}

// openAll lets this GPU access the sources of all moves by their addresses, in a job.
func (d *device) openAll(moves []peerMove) error {
	for i := range moves {
		if err := moves[i].from.openTo(d); err != nil {
			return err
		}
	}
	return nil
}

// peerMemory returns the memory that a piece copies from, after checking that this GPU can reach it.
func (d *device) peerMemory(p *gpubackend.PeerCopy) (*memory, error) {
	if p.From == nil {
		return nil, fmt.Errorf("%w: no memory to copy from", gpubackend.ErrRange)
	}
	m, ok := p.From.(*memory)
	if !ok {
		return nil, fmt.Errorf("%w: memory of another kind", gpubackend.ErrNoPeer)
	}
	if _, err := m.dev.own(m, p.FromOff, p.N); err != nil {
		return nil, err
	}
	if err := m.dev.lost(); err != nil {
		return nil, fmt.Errorf("%w: the source is lost: %s", gpubackend.ErrNoPeer, err.Error())
	}
	return m, d.reaches(m.dev)
}

// reaches returns nil if the copy engines of d can read the memory of o. It asks the driver once.
func (d *device) reaches(o *device) error {
	if d.handle == o.handle {
		return nil
	}
	d.peersMu.Lock()
	defer d.peersMu.Unlock()
	err, asked := d.peers[o.handle]
	if !asked {
		var can int32
		err = d.drv.check("cuDeviceCanAccessPeer", d.drv.deviceCanAccessPeer(&can, d.handle, o.handle))
		if err != nil || can == 0 {
			err = fmt.Errorf("%w: %s has no peer access to %s", gpubackend.ErrNoPeer, d.info.Name, o.info.Name)
		}
		if d.peers == nil {
			d.peers = make(map[deviceHandle]error)
		}
		d.peers[o.handle] = err
	}
	return err
}

// openTo lets the GPU of d access the memory by its address until the memory is freed. It runs in a job of d.
func (m *memory) openTo(d *device) error {
	if m.dev.handle == d.handle {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.peers[d.handle] {
		return nil
	}
	desc := accessDesc{location: onDevice(d.handle), flags: accessReadWrite}
	if err := d.drv.check("cuMemSetAccess", d.drv.memSetAccess(m.base, uintptr(m.size), &desc, 1)); err != nil {
		return fmt.Errorf("%w: %w", gpubackend.ErrNoPeer, err)
	}
	if m.peers == nil {
		m.peers = make(map[deviceHandle]bool)
	}
	m.peers[d.handle] = true
	return nil
}

// runPeer copies. It runs in the lane. Even with an error, it returns only when no copy is under way. The caller keeps
// the memory of both sides from being freed.
func (c *copier) runPeer(ctx context.Context, moves []peerMove) (err error) {
	drv, queued := c.lane.drv, int64(0)
	for i, m := range moves {
		if err = ctx.Err(); err != nil {
			break
		}
		if err = drv.check("cuMemcpyDtoDAsync", drv.memcpyDtoDAsync(m.to, m.base, uintptr(m.n),
			c.lane.stream)); err != nil {
			break
		}
		if queued += m.n; queued >= peerSize || i == len(moves)-1 {
			queued = 0
			if err = c.lane.sync(c.ring[0].event); err != nil {
				break
			}
		}
	}
	if err != nil {
		_ = drv.streamSynchronize(c.lane.stream)
	}
	return err
}
