package cleanread

import (
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// probeBytes is the most bytes that are read only to measure.
const probeBytes = ChunkSize

// option is a way to serve a read: from home alone, or pages from a device and the rest from home.
type option struct {
	from  *Have // nil: home alone
	pages page.Range
}

// choose decides where n bytes at off come from; nil: from home alone. Home's part is one piece, so a device gives only
// the beginning or the end.
func (f *File) choose(facts *Facts, off, n int64, now time.Time) (plan *deviceCopy) {
	if facts == nil || off+n > facts.size {
		return nil
	}
	rg := page.Covering(off, n)
	var best option
	if f.c.When == Auto {
		best = f.cheapest(facts, off, n)
	} else {
		best = most(facts, rg)
	}
	f.probe(facts, rg, best.from, now)
	if best.from == nil {
		return nil
	}
	if plan = f.plan(facts, best.from, best.pages); plan != nil {
		plan.beUrgent(best.from.Device.Moves.Cost.Time(best.pages.Bytes()))
	}
	return plan
}

// most returns the device that has most of a read, from the beginning of it, or else up to its end.
func most(facts *Facts, rg page.Range) (best option) {
	for i := range facts.haves {
		x := &facts.haves[i]
		first, last := x.Pages[0], x.Pages[len(x.Pages)-1]
		if x.Device.Moves.Cost.Stuck() {
			continue
		}
		switch {
		case first.Start == rg.Start && (best.from == nil || first.End > best.pages.End):
			best = option{x, first}
		case first.Start > rg.Start && last.End == rg.End && best.from == nil:
			best = option{x, last}
		}
	}
	return best
}

// cheapest returns the option that is expected to be fastest, or one that is due for a trial.
func (f *File) cheapest(facts *Facts, off, n int64) option {
	rg, disk := page.Covering(off, n), f.c.disk
	options, times := make([]option, 1, 4), make([]time.Duration, 1, 4) // on the stack
	times[0] = disk.Time(n)
	for i := range facts.haves {
		x := &facts.haves[i]
		first, last := x.Pages[0], x.Pages[len(x.Pages)-1]
		at, overhead := x.Device.Moves.Cost, x.Device.overhead
		if at.Stuck() {
			continue
		}
		switch {
		case first.Start == rg.Start:
			most := min(first.End.Offset(), off+n) - off
			give, t := most, at.Time(most)+disk.Time(n-most) // without engines: the reader copies, one by one
			if x.Device.Engines {
				give, t = mover.Split(at, disk, n, most, page.Size)
			}
			if give > 0 && give < most {
				give = (off+give)&^(page.Size-1) - off // whole pages
			}
			if give <= 0 { // the device is slower, and may be due for a trial
				give, t = most, max(at.Time(most), disk.Time(n-most))
			}
			options = append(options, option{x, page.Covering(off, give)})
			times = append(times, t+overhead.Time(give))
		case last.End == rg.End:
			most := off + n - last.Offset()
			t := at.Time(most) + disk.Time(n-most)
			if x.Device.Engines {
				t = max(at.Time(most), disk.Time(n-most))
			}
			options, times = append(options, option{x, last}), append(times, t+overhead.Time(most))
		}
	}
	return options[f.c.trials.Pick(n, times)]
}

// homesTurn reports whether home should be tried instead of a device that is expected to take so long for n bytes.
func (f *File) homesTurn(n int64, took time.Duration) bool {
	return f.c.When == Auto && f.c.around.Pick(n, []time.Duration{f.c.disk.Time(n), took}) == 0
}

// fastest returns the device that is expected to give all pages of rg first, and the expected time. share reads of n
// bytes are expected to need it. It returns nil if the disk would be faster with these reads than each device, or if
// each device would take much longer for rg than for n bytes.
func (f *File) fastest(facts *Facts, rg page.Range, n, share int64) (best *Have, took time.Duration) {
	if facts == nil || rg.End > page.Count(facts.size) {
		return nil, 0
	}
	took = time.Duration(share) * f.c.disk.Time(n)
	for i := range facts.haves {
		x := &facts.haves[i]
		at := x.Device.Moves.Cost
		if x.Pages[0] != rg || at.Stuck() || !f.c.fetchesMoreFrom(x.Device) {
			continue
		}
		all := at.Time(rg.Bytes())
		if all < took && all <= aroundTimes*at.Time(n) || best == nil && f.c.When == Always {
			best, took = x, all
		}
	}
	return best, took
}

// probe measures the places that were not chosen, if that is due. Nobody waits for it.
func (f *File) probe(facts *Facts, rg page.Range, chosen *Have, now time.Time) {
	c := f.c
	if c.When != Auto {
		return
	}
	if chosen != nil && c.disk.Due(now) {
		f.probeHome(rg)
	}
	for i := range facts.haves {
		x := &facts.haves[i]
		at := x.Device.Moves.Cost
		if x == chosen || x.Device.Lost() || !at.Due(now) {
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

// probeHome also reads from home what a device is about to give.
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
		_, _ = c.homeRead(readAt, buf[:rg.Bytes()], rg.Offset(), true)
	}) {
		c.disk.Measured()
	}
}
