package mover

import (
	"cmp"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
)

const (
	// fewCopies is how many copies are too few to be worth joining.
	fewCopies = 8
	// mostGathered is the most bytes of a piece that are gathered because others use its buffer. More come only if the
	// same bytes go to many places.
	mostGathered = 2 * PieceBytes
)

// pack joins the copies of a piece that was read, if there are many. If they need only a small part of its bytes, they
// move to a smaller buffer. Then the large buffer can be read into again while the processor's cache has it. They also
// move if others use the buffer.
func (p *Fill) pack(x *Piece) {
	whole := x.bytes
	x.bytes = copySizes(x.copies)
	if len(x.copies) <= fewCopies {
		return
	}
	if x.bytes <= whole/2 || x.lent && x.bytes <= mostGathered {
		if buf, giveBack, err := p.Device.dev.HostBuffer(int(x.bytes)); err == nil {
			gathered := false
			defer func() {
				if !gathered {
					giveBack() // what is gathered shows a file that has become shorter
				}
			}()
			x.copies = gather(x.copies, buf)
			gathered = true
			x.giveBack()
			x.buf, x.giveBack, x.lent, x.inPlace = buf, giveBack, false, false
			return
		}
	}
	if !x.lent {
		x.copies = join(x.copies, x.buf)
	}
}

// gather copies the bytes of copies into buf, and joins copies that are adjacent in device memory.
func gather(copies []gpubackend.Copy, buf []byte) (joined []gpubackend.Copy) {
	at := 0
	for i := range copies {
		from := at
		for _, row := range copies[i].Rows() {
			at += copy(buf[at:], row)
		}
		c, k := &copies[i], len(joined)-1
		if k >= 0 && joined[k].Mem == c.Mem && joined[k].Off+int64(len(joined[k].Host)) == c.Off {
			joined[k].Host = joined[k].Host[:len(joined[k].Host)+at-from]
		} else {
			joined = append(joined, gpubackend.Copy{Mem: c.Mem, Off: c.Off, Host: buf[from:at]})
		}
	}
	return joined
}

// placeIn returns where in buf the bytes of a copy begin, or -1 if they are elsewhere. The capacity of both slices
// reaches to the end of the same memory.
func placeIn(buf []byte, c *gpubackend.Copy) int {
	at := cap(buf) - cap(c.Host)
	if at < 0 || at >= cap(buf) || len(c.Host) == 0 || &buf[:cap(buf)][at] != &c.Host[0] {
		return -1
	}
	return at
}

// join merges copies of parts of buf that are adjacent in device memory, if there are many: for example segments with
// other bytes of the file between them. It moves the bytes together in buf. Copies with rows, and copies from other
// memory, stay as they are. The order of the copies changes.
func join(copies []gpubackend.Copy, buf []byte) []gpubackend.Copy {
	if len(copies) <= fewCopies {
		return copies
	}
	at := func(c gpubackend.Copy) int { return placeIn(buf, &c) }
	slices.SortFunc(copies, func(a, b gpubackend.Copy) int { return cmp.Compare(at(a), at(b)) })
	n, end := 0, 0 // end of the bytes that copies so far need
	for i, c := range copies {
		from := at(c)
		alone := i+1 == len(copies) || at(copies[i+1]) >= from+len(c.Host) // no other copy needs bytes of c
		if n > 0 && c.Row == 0 && copies[n-1].Row == 0 && at(copies[n-1]) >= 0 && (alone || from == end) {
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
		if n++; from >= 0 {
			end = max(end, from+len(c.Host))
		}
	}
	return copies[:n]
}
