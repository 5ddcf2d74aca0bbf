package mover

import (
	"cmp"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// fewCopies is how many copies are too few to be worth joining.
const fewCopies = 8

// pack joins the copies of a piece that was read. If they need only a small part of its bytes, they move to a smaller
// buffer. Then the large buffer can be read into again while the processor's cache has it.
func (p *Fill) pack(x *Piece) {
	total := 0
	for _, c := range x.copies {
		total += len(c.Host)
	}
	if int64(total) <= x.bytes/2 && len(x.copies) > fewCopies {
		if buf, giveBack, err := p.Device.dev.HostBuffer(total); err == nil {
			x.copies = gather(x.copies, buf)
			x.giveBack()
			x.buf, x.giveBack, x.bytes = buf, giveBack, int64(total)
			return
		}
	}
	x.copies = join(x.copies, x.buf)
}

// join merges copies of parts of buf that are adjacent in device memory, if there are many: for example rows of a
// segment, which have other bytes of the file between them. It moves the bytes together in buf. The order of the copies
// changes.
func join(copies []gpubackend.Copy, buf []byte) []gpubackend.Copy {
	if len(copies) <= fewCopies {
		return copies
	}
	at := func(c gpubackend.Copy) int { return cap(buf) - cap(c.Host) }
	slices.SortFunc(copies, func(a, b gpubackend.Copy) int { return cmp.Compare(at(a), at(b)) })
	n, end := 0, 0 // end of the bytes that copies so far need
	for i, c := range copies {
		from := at(c)
		alone := i+1 == len(copies) || at(copies[i+1]) >= from+len(c.Host) // no other copy needs bytes of c
		if n > 0 && (alone || from == end) {
			last := &copies[n-1]
			if last.Mem == c.Mem && last.Off+int64(len(last.Host)) == c.Off && from >= end &&
				end == at(*last)+len(last.Host) {
				last.Host = last.Host[:len(last.Host)+len(c.Host)]
				copy(buf[end:], c.Host)
				end += len(c.Host)
				continue
			}
		}
		copies[n] = c
		n, end = n+1, max(end, from+len(c.Host))
	}
	return copies[:n]
}
