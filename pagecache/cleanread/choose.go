package cleanread

import (
	"time"

	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/internal/page"
)

// probeBytes is the most that is read only to measure.
const probeBytes = ChunkSize

// choose decides where n bytes at off come from; nil: from home alone. What home gives besides a device is one piece,
// so a device is only asked for the beginning or the end.
func (f *File) choose(facts *Facts, off, n int64) (plan *deviceCopy) {
	if facts == nil || off+n > facts.size {
		return nil
	}
	rg := page.Covering(off, n)
	var best *Have
	var pages page.Range
	disk := f.c.disk.Now()
	took := disk.Time(n)
	for i := range facts.haves {
		x := &facts.haves[i]
		first, last := x.Pages[0], x.Pages[len(x.Pages)-1]
		s := x.Device.Moves.Cost.Now()
		if s.Stuck() {
			continue
		}
		switch {
		case first.Start == rg.Start:
			most := min(first.End.Offset(), off+n) - off
			if f.c.When == Always {
				if best == nil || first.End > pages.End {
					best, pages = x, first
				}
				continue
			}
			give, t := most, s.Time(most)+disk.Time(n-most) // where the reader copies himself, one after the other
			if x.Device.Engines {
				give, t = cost.Split(&s, &disk, n, most, page.Size)
			}
			if give > 0 && give < most {
				give = (off+give)&^(page.Size-1) - off // whole pages
			}
			if give > 0 && t < took {
				best, took, pages = x, t, page.Covering(off, give)
			}
		case last.End == rg.End:
			most := off + n - last.Offset()
			t := s.Time(most) + disk.Time(n-most)
			if x.Device.Engines {
				t = max(s.Time(most), disk.Time(n-most))
			}
			if t < took || f.c.When == Always && best == nil {
				best, took, pages = x, t, last
			}
		}
	}
	f.probe(facts, rg, best)
	if best == nil {
		return nil
	}
	if plan = f.plan(facts, best, pages); plan != nil {
		s := best.Device.Moves.Cost.Now()
		plan.beUrgent(s.Time(pages.Bytes()))
	}
	return plan
}

// fastest returns the device from which all pages of rg, of which somebody waits for n bytes, are thought to be there
// first, and how long that takes; nil if none is faster than the disk is with the n bytes, or it would take much longer
// than they alone.
func (f *File) fastest(facts *Facts, rg page.Range, n int64) (best *Have, took time.Duration) {
	if facts == nil || rg.End > page.Count(facts.size) {
		return nil, 0
	}
	disk := f.c.disk.Now()
	took = disk.Time(n)
	for i := range facts.haves {
		x := &facts.haves[i]
		s := x.Device.Moves.Cost.Now()
		if x.Pages[0] != rg || s.Stuck() || !f.c.fetchesMoreFrom(x.Device) {
			continue
		}
		all := s.Time(rg.Bytes())
		if all < took && all <= aroundTimes*s.Time(n) || best == nil && f.c.When == Always {
			best, took = x, all
		}
	}
	return best, took
}

// probe measures what was not chosen, if that is due, without anybody waiting for it.
func (f *File) probe(facts *Facts, rg page.Range, chosen *Have) {
	c := f.c
	if c.When != Auto {
		return
	}
	if chosen != nil && c.disk.Due() {
		f.probeHome(rg)
	}
	for i := range facts.haves {
		x := &facts.haves[i]
		at := x.Device.Moves.Cost
		if x == chosen || x.Device.Lost() || !at.Due() {
			continue
		}
		pages := x.Pages[0]
		pages.End = min(pages.End, pages.Start+probeBytes>>page.Shift)
		p := f.plan(facts, x, pages)
		if p == nil {
			at.Measured()
			continue
		}
		if !c.inBackground(func() {
			defer at.Measured()
			if p.Start() {
				<-p.Done()
				p.Finish()
			}
		}) {
			p.Drop()
			at.Measured()
		}
	}
}

// probeHome reads what a device is about to give from home too.
func (f *File) probeHome(rg page.Range) {
	c := f.c
	rg.End = min(rg.End, rg.Start+probeBytes>>page.Shift)
	if !c.inBackground(func() {
		defer c.disk.Measured()
		readAt, giveBack := f.ex.BorrowHome()
		if readAt == nil {
			return
		}
		defer giveBack()
		buf := c.memory.take()
		if buf == nil {
			return
		}
		defer c.memory.give(buf)
		_, _ = c.homeRead(readAt, buf[:rg.Bytes()], rg.Offset())
	}) {
		c.disk.Measured()
	}
}
