package emulated

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// pagesAPiece is the pages of which the digests are taken between two looks at the context.
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

// stretch is a part of a scan that one goroutine does.
type stretch struct {
	scan     int // which scan
	from, to int // its pages, counted from the scan's first
	modified []page.Range
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
		for from := 0; from < len(s.Agreed); from += pagesAPiece {
			stretches = append(stretches, stretch{scan: i, from: from, to: min(from+pagesAPiece, len(s.Agreed))})
		}
	}
	err = inPieces(ctx, len(stretches), func(i int) {
		x := &stretches[i]
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
