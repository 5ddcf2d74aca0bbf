package emulated

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/mapped"
	"github.com/gaiafs/gaiafs/internal/page"
)

// own returns the device's own type of mem, after checking that the n bytes at off lie in it.
func (d *device) own(mem gpubackend.Memory, off, n int64) (*memory, error) {
	m, ok := mem.(*memory)
	if !ok || m.dev != d {
		return nil, fmt.Errorf("%w: memory of another device", gpubackend.ErrRange)
	}
	if off < 0 || n < 0 || off > m.size || n > m.size-off {
		return nil, fmt.Errorf("%w: %d bytes at %d of %d", gpubackend.ErrRange, n, off, m.size)
	}
	return m, nil
}

// ownPages is own for n pages, of which the first begins at off.
func (d *device) ownPages(mem gpubackend.Memory, off int64, n int) (*memory, error) {
	if off&(page.Size-1) != 0 {
		return nil, fmt.Errorf("%w: offset %d is not at the start of a page", gpubackend.ErrRange, off)
	}
	return d.own(mem, off, int64(n)<<page.Shift)
}

// part is a piece of memory, and the host's or a peer's memory that it is copied from or to: all of it, or rows as in
// gpubackend.Copy.
type part struct {
	mem         []byte
	host        []byte
	row, stride int
}

// cutCopy appends one copy to parts, in parts of about pieceSize.
func cutCopy(parts []part, c *gpubackend.Copy) []part {
	mem := c.Mem.(*memory).data[c.Off:][:c.Bytes()]
	if c.Row == 0 {
		return cut(parts, part{mem: mem, host: c.Host})
	}
	host, row, stride := c.Host, int(c.Row), int(c.Stride)
	for rows := max(pieceSize/row, 1); len(mem) > rows*row; {
		parts = append(parts, part{mem[:rows*row], host[:(rows-1)*stride+row], row, stride})
		mem, host = mem[rows*row:], host[rows*stride:]
	}
	if len(mem) > 0 {
		parts = append(parts, part{mem, host, row, stride})
	}
	return parts
}

// each calls one for the part's memory on both sides, row by row.
func (p *part) each(one func(mem, host []byte)) {
	if p.row == 0 {
		one(p.mem, p.host)
		return
	}
	mem, host := p.mem, p.host
	for len(mem) > p.row {
		one(mem[:p.row], host[:p.row])
		mem, host = mem[p.row:], host[p.stride:]
	}
	one(mem, host)
}

// cut appends one copy without rows to parts, in parts of at most pieceSize.
func cut(parts []part, p part) []part {
	for len(p.mem) > pieceSize {
		parts = append(parts, part{mem: p.mem[:pieceSize], host: p.host[:pieceSize]})
		p = part{mem: p.mem[pieceSize:], host: p.host[pieceSize:]}
	}
	if len(p.mem) > 0 {
		parts = append(parts, p)
	}
	return parts
}

// bundle groups parts into pieces of about pieceSize, so that many small copies become one piece of work. It returns
// the index after each piece's last part.
func bundle(parts []part) (ends []int) {
	size := 0
	for i, p := range parts {
		if size > 0 && size+len(p.mem) > pieceSize {
			ends = append(ends, i)
			size = 0
		}
		size += len(p.mem)
	}
	if len(parts) > 0 {
		ends = append(ends, len(parts))
	}
	return ends
}

// copyPieces copies with one, a copy of plain memory in either direction.
func (d *device) copyPieces(ctx context.Context, pieces []gpubackend.Copy, one func(mem, host []byte)) error {
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
	parts := make([]part, 0, len(pieces))
	for i := range pieces {
		parts = cutCopy(parts, &pieces[i])
	}
	return inBundles(ctx, parts, one)
}

// inBundles copies the parts with one, several at once.
func inBundles(ctx context.Context, parts []part, one func(mem, host []byte)) error {
	ends := bundle(parts)
	return inPieces(ctx, len(ends), func(i int) {
		start := 0
		if i > 0 {
			start = ends[i-1]
		}
		for k := start; k < ends[i]; k++ {
			parts[k].each(one)
		}
	})
}

// CopyIn is a plain copy with wide stores. It is not for pages that another process may be storing into: use Patch
// there.
func (d *device) CopyIn(ctx context.Context, pieces []gpubackend.Copy) error {
	var gone atomic.Bool
	err := d.copyPieces(ctx, pieces, func(mem, host []byte) {
		if !mapped.Try(func() { copy(mem, host) }) {
			gone.Store(true)
		}
	})
	if err == nil && gone.Load() {
		return gpubackend.ErrHostGone
	}
	return err
}

// CopyOut reads memory that other processes may be storing into. Each byte is one that the memory had during the call;
// two bytes may be from different moments.
func (d *device) CopyOut(ctx context.Context, pieces []gpubackend.Copy) error {
	return d.copyPieces(ctx, pieces, func(mem, host []byte) { copy(host, mem) })
}

// CopyPeer copies from memory of any emulated device.
func (d *device) CopyPeer(ctx context.Context, pieces []gpubackend.PeerCopy) error {
	done, err := d.use(2*len(pieces), func(i int) (*memory, error) {
		p := &pieces[i/2]
		if i%2 == 0 {
			return d.own(p.Mem, p.Off, p.N)
		}
		from, ok := p.From.(*memory)
		if p.From != nil && !ok {
			return nil, fmt.Errorf("%w: memory of another kind", gpubackend.ErrNoPeer)
		}
		if !ok {
			return nil, fmt.Errorf("%w: no memory to copy from", gpubackend.ErrRange)
		}
		return from.dev.own(from, p.FromOff, p.N)
	})
	if err != nil {
		return err
	}
	defer done()
	parts := make([]part, 0, len(pieces))
	for _, p := range pieces {
		parts = cut(parts, part{mem: p.Mem.(*memory).data[p.Off:][:p.N], host: p.From.(*memory).data[p.FromOff:][:p.N]})
	}
	return inBundles(ctx, parts, func(mem, host []byte) { copy(mem, host) })
}

// leastHole is the size from which punching a hole is faster than storing zeros.
const leastHole = 64 << 10

func (d *device) Zero(ctx context.Context, mem gpubackend.Memory, off, n int64) error {
	done, err := d.use(1, func(int) (*memory, error) { return d.own(mem, off, n) })
	if err != nil {
		return err
	}
	defer done()
	if err := ctx.Err(); err != nil {
		return err
	}
	m := mem.(*memory)
	mask := int64(unix.Getpagesize() - 1)
	if from, to := (off+mask)&^mask, (off+n)&^mask; to-from >= leastHole && !d.poison {
		// A hole takes no memory, and punching an existing hole costs nothing.
		const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
		if unix.Fallocate(int(m.file.Fd()), punch, from, to-from) == nil {
			clear(m.data[off:from])
			clear(m.data[to : off+n])
			return nil
		}
	}
	data := m.data[off : off+n]
	pieces := (len(data) + pieceSize - 1) / pieceSize
	return inPieces(ctx, pieces, func(i int) {
		clear(data[i*pieceSize : min((i+1)*pieceSize, len(data))])
	})
}
