package emulated

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// pagesAPiece is the number of pages digested between two checks of the context.
const pagesAPiece = pieceSize >> page.Shift

func (d *device) Digests(ctx context.Context, mem gpubackend.Memory, off int64, out []gpubackend.Digest) error {
	done, err := d.use(1, func(int) (*memory, error) { return d.ownPages(mem, off, len(out)) })
	if err != nil {
		return err
	}
	defer done()
	data := mem.(*memory).data[off:]
	pieces := (len(out) + pagesAPiece - 1) / pagesAPiece
	return inPieces(ctx, pieces, func(i int) {
		from, to := i*pagesAPiece, min((i+1)*pagesAPiece, len(out))
		d.key.SumPages(data[from<<page.Shift:to<<page.Shift], out[from:to])
	})
}

// stretch is the part of a scan that one goroutine handles.
type stretch struct {
	scan     int // which scan
	from, to int // its pages, counted from the scan's first
	hole     bool
	modified []page.Range
}

// appendHole appends the pages [from, to) of a scan that are a hole of the memfd. They are zeros; reading them would
// allocate memory.
func appendHole(stretches []stretch, scan int, agreed []gpubackend.Digest, from, to int,
	zero gpubackend.Digest) []stretch {
	if from == to {
		return stretches
	}
	x := stretch{scan: scan, from: from, to: to, hole: true}
	for i := from; i < to; i++ {
		if agreed[i] != zero {
			x.modified = page.AppendRange(x.modified, page.Range{Start: page.Index(i), End: page.Index(i + 1)})
		}
	}
	return append(stretches, x)
}

// fewPages is the number of pages up to which a scan does not ask which of them the memfd has.
const fewPages = 16

// eachData calls fn for those runs of the n pages at off that are no hole of the memfd, counted from the first page.
func (m *memory) eachData(off int64, n int, fn func(from, to int)) {
	end := off + int64(n)<<page.Shift
	for at := off; at < end; {
		from, to := at, end
		if n > fewPages {
			var err error
			if from, err = unix.Seek(int(m.file.Fd()), at, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) || err == nil &&
				from >= end {
				return
			}
			if err == nil {
				to, err = unix.Seek(int(m.file.Fd()), from, unix.SEEK_HOLE)
			}
			if err != nil {
				from, to = at, end
			}
		}
		from, to = (from-off)>>page.Shift, (min(to, end)-off+page.Size-1)>>page.Shift
		fn(int(from), int(to))
		at = off + to<<page.Shift
	}
}

func (d *device) Modified(ctx context.Context, scans []gpubackend.Scan) ([][]page.Range, error) {
	done, err := d.use(len(scans), func(i int) (*memory, error) {
		return d.ownPages(scans[i].Mem, scans[i].Off, len(scans[i].Agreed))
	})
	if err != nil {
		return nil, err
	}
	defer done()
	var stretches []stretch
	for i, s := range scans {
		last := 0
		s.Mem.(*memory).eachData(s.Off, len(s.Agreed), func(from, to int) {
			stretches = appendHole(stretches, i, s.Agreed, last, from, d.zero)
			for last = to; from < to; from += pagesAPiece {
				stretches = append(stretches, stretch{scan: i, from: from, to: min(from+pagesAPiece, to)})
			}
		})
		stretches = appendHole(stretches, i, s.Agreed, last, len(s.Agreed), d.zero)
	}
	err = inPieces(ctx, len(stretches), func(i int) {
		x := &stretches[i]
		if x.hole {
			return
		}
		s := &scans[x.scan]
		x.scanPages(d.key, s.Mem.(*memory).data[s.Off:], s.Agreed)
	})
	if err != nil {
		return nil, err
	}
	out := make([][]page.Range, len(scans))
	for _, x := range stretches {
		for _, r := range x.modified {
			out[x.scan] = page.AppendRange(out[x.scan], r)
		}
	}
	return out, nil
}

func (x *stretch) scanPages(key *gpubackend.DigestKey, data []byte, agreed []gpubackend.Digest) {
	for i := x.from; i < x.to; i++ {
		if key.Sum(data[i<<page.Shift:(i+1)<<page.Shift]) != agreed[i] {
			x.modified = page.AppendRange(x.modified, page.Range{Start: page.Index(i), End: page.Index(i + 1)})
		}
	}
}
