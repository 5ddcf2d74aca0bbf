package pagecache

import (
	"bytes"
	"context"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// collectPortion is the most pages that a device is asked for in one call, scattered or not, 8 MiB.
const collectPortion = 2048

// portion is pages that one owner released, on their way home: ascending runs of at most bufferPages pages. It is
// fetched while whoever holds File.mu writes the portion before it, so fetch uses nothing of the file that this
// changes. The device's bytes are read once; they, and not what the device has a moment later, are what home gets and
// what the device is compared with from now on.
type portion struct {
	f       *File
	h       *holding
	plan    lrc.CollectPlan
	ranges  []page.Range   // of its runs
	bases   [][]*pageBytes // of the pages of those runs that have another base than home
	keeping keeping
	size    int64 // of the file

	// fetched is closed when fetch has ended. Then err is set, or the rest is there.
	fetched  chan struct{}
	err      error
	giveBack func()                // of the memory of mine
	mine     [][]byte              // of each run, what the device has
	sums     [][]gpubackend.Digest // of mine
	merged   [][]byte              // what home is to have: mine, or a buffer
	differ   [][]page.Range        // where merged differs from mine
	flies    bool                  // it is a flight's
}

// portionsOf cuts what one owner released into portions of so many pages at most.
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

// newPortionLocked returns a portion that is to be fetched. The bases that it refers to stay until it is stored.
func (f *File) newPortionLocked(h *holding, runs []lrc.Pending) *portion {
	c := &portion{
		f: f, h: h, plan: f.lrc.BeginCollect(runs), ranges: make([]page.Range, len(runs)),
		bases: make([][]*pageBytes, len(runs)),
		size:  f.size, fetched: make(chan struct{}), giveBack: func() {},
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

// fetch brings the portion from the device and merges it. File.mu is held by somebody who waits for it in the end.
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
		// What lies past the end is not released: if the file grows, it is a modification, or goes.
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

// merge makes what home is to have of run i.
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
		// What lies past end of file is nobody's.
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

// missingBase is the error of a page whose base should be there. Without it nobody can tell who changed what.
func missingBase(p page.Index) error {
	return fail(syscall.EIO, "page %d was changed at home and on a device, and what it was before is missing: nothing is overwritten", p)
}

// storeLocked brings a portion home that was fetched, or has it fly. After an error of home, the runs before the one at
// fault are home. With careful it looks at home first: what somebody else stored there since the portion was begun
// would be overwritten.
func (f *File) storeLocked(c *portion, fly, careful bool) error {
	if c.err == nil && careful { // before bases are kept
		c.err = f.asSeenLocked()
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

// overwriteLocked writes a portion home, and returns how many of its runs are there.
func (f *File) overwriteLocked(c *portion, careful bool) (written int, err error) {
	for _, rg := range joined(c.ranges) {
		if err := f.landLocked(rg); err != nil {
			return 0, err
		}
	}
	written, err = f.writeHomeLocked(c.ranges, c.merged, careful)
	for _, rg := range joined(c.ranges) {
		f.spoilLocked(rg)
	}
	return written, err
}

// abortLocked leaves home as it is.
func (c *portion) abortLocked() {
	c.keeping.free(c.f)
	c.plan.Abort()
}

// free gives the memory back.
func (c *portion) free() {
	for i, m := range c.merged {
		if m != nil && &m[0] != &c.mine[i][0] {
			giveBuffer((*buffer)(m[:cap(m)]))
		}
	}
	c.giveBack()
}
