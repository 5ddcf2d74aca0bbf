package cuda

import (
	"context"
	"encoding/binary"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// stretch is the part of a scan that is in one round.
type stretch struct {
	scan  int // which scan
	from  int // its first page, counted from the scan's first
	pages int
	base  address // of that page
}

// rounds divides n scans, of pages(i) pages from base(i) on, into rounds that fit into the worker's memory.
func rounds(n int, pages func(i int) int, base func(i int) address) (all [][]stretch) {
	var round []stretch
	room := roundPages
	for i := range n {
		for from, count := 0, pages(i); from < count; {
			if room == 0 || len(round) == roundRuns {
				all = append(all, round)
				round, room = nil, roundPages
			}
			s := stretch{scan: i, from: from, pages: min(room, count-from), base: base(i) + address(from)*pageSize}
			round = append(round, s)
			room -= s.pages
			from += s.pages
		}
	}
	if len(round) > 0 {
		all = append(all, round)
	}
	return all
}

// agreedAt is the offset of a round's agreed digests, after the runs.
const agreedAt = roundRuns * runSize

// describe stores a round's runs into the page-locked memory and returns the number of its pages.
func (w *worker) describe(round []stretch) (pages int) {
	p := w.host.bytes()
	for i, s := range round {
		putWords(p[i*runSize:], uint64(s.base), uint64(pages))
		pages += s.pages
	}
	return pages
}

// grid returns the number of blocks for so many pages.
func (w *worker) grid(pages int) uint32 {
	const warps = blockThreads / 32
	return min(uint32((pages+warps-1)/warps), w.blocks)
}

// sum stores the digests of one round's pages into out.
func (w *worker) sum(round []stretch, out []gpubackend.Digest) error {
	pages := w.describe(round)
	err := w.up(0, len(round)*runSize)
	if err == nil {
		err = w.launch(w.digests, w.grid(pages), uint64(w.dev), uint64(len(round)), uint64(pages), uint64(w.dev+keyAt),
			uint64(w.dev+downAt))
	}
	if err == nil {
		err = w.down(downAt, 8*pages)
	}
	if err = w.finish(err); err != nil {
		return err
	}
	copy(digestBytes(out), w.host.bytes()[downAt:])
	return nil
}

// digestBytes returns the digests as bytes in the device's order: all hosts of CUDA are little-endian, like GPUs. The
// bytes alias the caller's digests, and are used only while the caller waits.
func digestBytes(d []gpubackend.Digest) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(d))), 8*len(d))
}

// compare appends the modified pages of one round to those found for each scan.
func (w *worker) compare(round []stretch, scans []gpubackend.Scan, found [][]page.Range) error {
	pages := w.describe(round)
	agreed := w.host.bytes()[agreedAt:upSize]
	at := 0
	for _, s := range round {
		at += copy(agreed[at:], digestBytes(scans[s.scan].Agreed[s.from:s.from+s.pages]))
	}
	err := w.up(0, len(round)*runSize)
	if err == nil {
		err = w.up(agreedAt, at)
	}
	if err == nil {
		err = w.launch(w.modified, w.grid(pages), uint64(w.dev), uint64(len(round)), uint64(pages),
			uint64(w.dev+keyAt), uint64(w.dev+agreedAt), uint64(w.dev+downAt))
	}
	if err == nil {
		err = w.down(downAt, pages)
	}
	if err = w.finish(err); err != nil {
		return err
	}
	flags := w.host.bytes()[downAt:]
	for _, s := range round {
		found[s.scan] = appendModified(found[s.scan], flags[:s.pages], page.Index(s.from))
		flags = flags[s.pages:]
	}
	return nil
}

// appendModified appends the pages whose flag is not 0. flags[0] is for page from.
func appendModified(found []page.Range, flags []byte, from page.Index) []page.Range {
	for i := 0; i < len(flags); {
		if i+8 <= len(flags) && binary.LittleEndian.Uint64(flags[i:]) == 0 {
			i += 8
			continue
		}
		if flags[i] != 0 {
			at := from + page.Index(i)
			found = page.AppendRange(found, page.Range{Start: at, End: at + 1})
		}
		i++
	}
	return found
}

func (d *device) Digests(ctx context.Context, mem gpubackend.Memory, off int64, out []gpubackend.Digest) error {
	done, err := d.use(1, func(int) (*memory, error) { return d.ownPages(mem, off, len(out)) })
	if err != nil {
		return err
	}
	defer done()
	base := mem.(*memory).base + address(off)
	all := rounds(1, func(int) int { return len(out) }, func(int) address { return base })
	if len(all) == 0 {
		return ctx.Err()
	}
	return d.run(ctx, d.workLane, func() error {
		for _, round := range all {
			if err := ctx.Err(); err != nil {
				return err
			}
			s := round[0] // of one scan a round has one stretch
			if err := d.worker.sum(round, out[s.from:s.from+s.pages]); err != nil {
				return err
			}
		}
		return nil
	})
}

func (d *device) Modified(ctx context.Context, scans []gpubackend.Scan) ([][]page.Range, error) {
	done, err := d.use(len(scans), func(i int) (*memory, error) {
		return d.ownPages(scans[i].Mem, scans[i].Off, len(scans[i].Agreed))
	})
	if err != nil {
		return nil, err
	}
	defer done()
	found := make([][]page.Range, len(scans))
	all := rounds(len(scans),
		func(i int) int { return len(scans[i].Agreed) },
		func(i int) address { return scans[i].Mem.(*memory).base + address(scans[i].Off) })
	if len(all) == 0 {
		return found, ctx.Err()
	}
	err = d.run(ctx, d.workLane, func() error {
		for _, round := range all {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := d.worker.compare(round, scans, found); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}
