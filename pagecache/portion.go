package pagecache

import (
	"bytes"
	"context"
	"math"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// collectPortion is the most pages that one call takes from a device, scattered or not: 8 MiB.
const collectPortion = 2048

// portion is a set of pages that one owner released, on their way home, in ascending runs of at most bufferPages pages.
// A portion is fetched while the holder of File.mu writes the one before it, so fetch uses nothing of the file that
// this write changes. The device's bytes are read once. Home gets these bytes, not what the device has a moment later,
// and the device is compared with them from now on.
type portion struct {
	f       *File
	h       *holding
	plan    lrc.CollectPlan
	ranges  []page.Range   // of the runs
	bases   [][]*pageBytes // of the pages of those runs whose base is not home
	keeping keeping
	size    int64 // of the file

	// fetched is closed when fetch has ended. Then either err or the fields below it are set.
	fetched  chan struct{}
	err      error
	giveBack func()                // frees the memory of mine
	mine     [][]byte              // of each run, the device's bytes
	sums     [][]gpubackend.Digest // of mine
	merged   [][]byte              // of each run, the bytes for home: mine, or a buffer
	differ   [][]page.Range        // where merged differs from mine
	flies    bool                  // it belongs to a flight
}

// portionsOf cuts the pages that one owner released into portions of at most the given number of pages.
func portionsOf(pending []lrc.Pending, most int64) (portions [][]lrc.Pending) {
	room := int64(0)
	for _, p := range pending {
		for !p.Range.Empty() {
			if room == 0 {
				portions, room = append(portions, nil), most
			}
			part := p
			part.Range.End = min(p.Range.End, p.Range.Start+page.Index(min(room, bufferPages)))
			p.Range.Start = part.Range.End
			last := &portions[len(portions)-1]
			*last, room = append(*last, part), room-part.Range.Len()
		}
	}
	return portions
}

// newPortionLocked returns a portion that is to be fetched. The bases that it refers to remain until it is stored.
func (f *File) newPortionLocked(h *holding, runs []lrc.Pending) *portion {
	c := &portion{
		f: f, h: h, plan: f.lrc.BeginCollect(runs), ranges: make([]page.Range, len(runs)),
		bases: make([][]*pageBytes, len(runs)),
		size:  f.home.Size(), fetched: make(chan struct{}), giveBack: func() {},
	}
	for i, p := range runs {
		c.ranges[i] = p.Range
		if p.Base == lrc.BaseHome {
			continue
		}
		c.bases[i] = make([]*pageBytes, p.Range.Len())
		for k := range c.bases[i] {
			c.bases[i][k] = f.bases.at(p.Range.Start+page.Index(k), p.Base)
		}
	}
	c.keeping = f.newKeepingLocked(c.plan.Keep)
	return c
}

// fetch brings the portion from the device and merges it. A goroutine that holds File.mu waits for it in the end.
func (c *portion) fetch(ctx context.Context) {
	defer close(c.fetched)
	if c.err = c.keeping.read(c.f); c.err == nil {
		c.err = c.copyOut(ctx)
	}
	if c.err != nil {
		return
	}
	c.merged, c.differ = make([][]byte, len(c.ranges)), make([][]page.Range, len(c.ranges))
	c.err = mover.InParallel(len(c.ranges), mover.MaxReaders, func(i int) error {
		// Bytes past the end are not released. If the file grows, they count as a modification, or they go.
		clear(c.mine[i][min(max(c.size-c.ranges[i].Start.Offset(), 0), c.ranges[i].Bytes()):])
		c.h.dev.Key().SumPages(c.mine[i], c.sums[i])
		return c.merge(i)
	})
}

// copyOut reads the device.
func (c *portion) copyOut(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	pages := pagesOf(c.ranges)
	buf, giveBack, err := c.h.dev.HostBuffer(int(pages) << page.Shift)
	if err != nil {
		return err
	}
	c.giveBack = giveBack
	c.mine, c.sums = make([][]byte, len(c.ranges)), make([][]gpubackend.Digest, len(c.ranges))
	rest, room := buf, make([]gpubackend.Digest, pages)
	for i, rg := range c.ranges {
		c.mine[i], rest = rest[:rg.Bytes()], rest[rg.Bytes():]
		c.sums[i], room = room[:rg.Len()], room[rg.Len():]
	}
	var copies []gpubackend.Copy
	for _, run := range joined(c.ranges) {
		copies = c.h.appendCopies(copies, run, buf[:run.Bytes()])
		buf = buf[run.Bytes():]
	}
	return c.h.dev.moves.Out(ctx, mover.WriteBack, copies)
}

// merge computes the bytes for home of run i.
func (c *portion) merge(i int) error {
	rg, mine, bases := c.ranges[i], c.mine[i], c.bases[i]
	if bases == nil {
		c.merged[i] = mine
		return nil
	}
	b := takeBuffer()
	merged := b[:len(mine)]
	c.merged[i] = merged
	if err := c.f.readHomeLocked(rg, merged); err != nil {
		return err
	}
	var overlap int64
	for k, base := range bases {
		off := k * page.Size
		m, h := mine[off:off+page.Size], merged[off:off+page.Size]
		at := rg.Start + page.Index(k)
		if base == nil {
			return missingBase(at)
		}
		// Bytes past end of file belong to nobody.
		n := max(min(c.size-at.Offset(), page.Size), 0)
		if both := lrc.Merge3(h[:n], base[:n], m[:n], h[:n]); c.plan.Runs[i].Base != lrc.BaseZero {
			overlap += int64(both)
		}
		copy(h[n:], m[n:])
		if !bytes.Equal(h, m) {
			c.differ[i] = page.AppendRange(c.differ[i], page.Range{Start: at, End: at + 1})
		}
	}
	if overlap > 0 {
		c.f.count(func(n *Counters) { n.OverlappingBytes.Add(overlap) })
	}
	return nil
}

// missingBase is the error for a page whose base is missing. Without the base nobody can tell who changed what.
func missingBase(p page.Index) error {
	return fail(syscall.EIO, "page %d was changed at home and on a device, and its earlier content is missing: nothing is overwritten", p)
}

// storeLocked writes a fetched portion home, or makes it a flight. After an error of home, the runs before the failed
// one are home. With careful it first checks home: what others stored there since the portion was begun must not be
// overwritten, or hidden by a flight.
func (f *File) storeLocked(c *portion, fly, careful bool) error {
	if c.err == nil && careful && fly {
		c.err = f.home.AsSeen()
	}
	if c.err != nil {
		c.abortLocked()
		return c.err
	}
	f.keepLocked(c.keeping)
	written, err := len(c.ranges), error(nil)
	if c.flies = fly && f.flyLocked(c); !c.flies {
		written, err = f.overwriteLocked(c, careful)
	}
	for i, rg := range c.ranges[:written] {
		from := c.sums[i]
		c.h.each(rg, func(x *extent, part page.Range) { from = from[copy(x.agreeOn(part), from):] })
	}
	f.collectedLocked(c.plan, c.ranges[:written], c.mine, c.differ)
	return err
}

// overwriteLocked writes a portion home and returns the number of runs that are home.
func (f *File) overwriteLocked(c *portion, careful bool) (written int, err error) {
	for _, rg := range joined(c.ranges) {
		if err := f.landLocked(rg); err != nil {
			return 0, err
		}
	}
	written, err = f.home.Write(c.ranges, c.merged, careful, math.MaxInt64)
	for _, rg := range joined(c.ranges) {
		f.spoilLocked(rg)
	}
	return written, err
}

// abortLocked gives the portion up. Home stays as it is.
func (c *portion) abortLocked() {
	c.keeping.free(c.f)
	c.plan.Abort()
}

// free frees the portion's memory.
func (c *portion) free() {
	for i, m := range c.merged {
		if m != nil && &m[0] != &c.mine[i][0] {
			giveBuffer((*buffer)(m[:cap(m)]))
		}
	}
	c.giveBack()
}
