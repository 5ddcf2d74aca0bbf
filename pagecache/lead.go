package pagecache

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

const (
	// leadShare is which part of what may fly is brought before the programs that read one file in order, all of them
	// together: 32 MiB. mostLead is how many pages that is at most for one of them, 16 MiB, and mostLeads how many of
	// them are followed. With what one call brings more that is half of what may fly.
	leadShare = 4
	mostLead  = 2 * mostCollectingReadPages
	mostLeads = 16
	// flightPortion is the pages of a portion that is to fly, 2 MiB: as much as the buffers of loads have, so that they
	// use the same ones, and what is read is given back soon.
	flightPortion = mover.PieceBytes >> page.Shift
)

// lead is what was brought for programs that read in order: one of them, or several of which one came to where another
// began.
type lead struct {
	pages page.Range // brought; the first of them may be home already
	at    page.Index // how far it was read
	read  int64      // leads.reads when it was read last
	asked bool       // more is on its way
}

// leads are those of a file. They overlap nowhere. flights.mu protects them; File.mu is held too where they come and
// go.
type leads struct {
	list  []lead
	reads int64 // counts
}

// share is how many pages are to be brought before each lead's programs, of so many for all.
func (l *leads) share(all page.Index) page.Index {
	return max(min(all/page.Index(max(len(l.list), 1)), mostLead), leastFlight)
}

// step is how many pages are brought at once for a lead: portions, or less where that is its share.
func (l *leads) step(all page.Index) page.Index {
	share := l.share(all)
	return min(max(share/2/flightPortion, 1)*flightPortion, share)
}

// readLocked notes a read of pages that fly, and reports whether more is to be brought.
func (l *leads) readLocked(rg page.Range, all page.Index) (asks bool) {
	l.reads++
	i := slices.IndexFunc(l.list, func(x lead) bool { return x.pages.Overlaps(rg) })
	if i < 0 {
		return false
	}
	x := &l.list[i]
	x.at, x.read = max(x.at, min(rg.End, x.pages.End)), l.reads
	if x.asked || x.pages.End-x.at >= l.share(all) {
		return false
	}
	x.asked = true
	return true
}

// followLocked has reads of what was brought of rg ask for what comes after it.
func (l *leads) followLocked(rg page.Range, at page.Index) {
	l.reads++
	now := lead{pages: rg, at: at, read: l.reads}
	l.list = slices.DeleteFunc(l.list, func(x lead) bool {
		if x.pages.End < now.pages.Start || x.pages.Start > now.pages.End {
			return false
		}
		if x.pages.Start <= rg.Start && x.pages.End > rg.End {
			return true // it was released again since
		}
		now.pages = page.Range{Start: min(x.pages.Start, now.pages.Start), End: max(x.pages.End, now.pages.End)}
		now.at, now.asked = max(now.at, x.at), now.asked || x.asked
		return true
	})
	if len(l.list) == mostLeads {
		oldest := 0
		for i, x := range l.list {
			if x.read < l.list[oldest].read {
				oldest = i
			}
		}
		l.list = slices.Delete(l.list, oldest, oldest+1)
	}
	l.list = append(l.list, now)
}

// moreLocked returns what a lead asked for that was not brought yet. broughtLocked is to be called.
func (l *leads) moreLocked(all page.Index) (more page.Range) {
	for _, x := range l.list {
		if x.asked {
			n := min(2*page.Index(x.pages.Len()), l.step(all))
			return page.Range{Start: x.pages.End, End: x.pages.End + n}
		}
	}
	return page.Range{}
}

// broughtLocked says that what moreLocked returned flies, or, with an empty rg, that it does not.
func (l *leads) broughtLocked(more, rg page.Range) {
	i := slices.IndexFunc(l.list, func(x lead) bool { return x.pages.End == more.Start })
	if i < 0 {
		return
	}
	if l.list[i].asked = false; rg.Empty() {
		l.list = slices.Delete(l.list, i, i+1)
		return
	}
	l.followLocked(rg, l.list[i].at)
}

// asksForMore notes a read of pages that fly, and reports whether those after them are to be brought.
func (f *File) asksForMore(rg page.Range) bool {
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	return f.flights.leads.readLocked(rg, f.c.mostAhead())
}

// mostAhead is how many pages may fly before the programs that read a file in order.
func (c *Cache) mostAhead() page.Index { return page.Index(c.mostAloft() / leadShare >> page.Shift) }

// bringMoreLocked brings what programs that read in order will want next, for one lead, and reports whether one asked.
func (f *File) bringMoreLocked() (asked bool) {
	s, all := &f.flights, f.c.mostAhead()
	s.mu.Lock()
	more := s.leads.moreLocked(all)
	s.mu.Unlock()
	if more.Empty() {
		return false
	}
	brought := f.bringAheadLocked(context.Background(), more)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leads.broughtLocked(more, brought)
	return true
}

// aheadLocked returns the pages to bring from devices for a read of rg: see collectingRuns. What flies is no more than
// what leads bring at once.
func (f *File) aheadLocked(rg page.Range, fly bool) page.Range {
	most := page.Index(mostCollectingReadPages)
	if fly {
		f.flights.mu.Lock()
		most = f.flights.leads.step(f.c.mostAhead())
		f.flights.mu.Unlock()
	}
	return f.collectingRuns.from(rg, most).Intersect(f.fileRangeLocked())
}

// followLocked has programs that read on behind at find what comes after rg, which was brought, if it flies.
func (f *File) followLocked(rg page.Range, at page.Index) {
	if !f.flights.overlap(rg) {
		return
	}
	f.showLocked(rg)
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	f.flights.leads.followLocked(rg, at)
}

// forgetLeadsLocked is called when reads pause: what was brought for programs that went away takes no share from
// others.
func (f *File) forgetLeadsLocked() {
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	f.flights.leads.list = nil
}

// bringAheadLocked has what devices released of rg fly, for a program that will read it next, and returns what it
// brought. What cannot fly stays where it is.
func (f *File) bringAheadLocked(ctx context.Context, rg page.Range) (brought page.Range) {
	rg = f.aheadLocked(rg, true)
	for f.flights.any() && !f.c.roomToFly(rg.Bytes()) {
		if f.landSomeLocked(landPages) != nil {
			return page.Range{}
		}
	}
	if len(f.lrc.Pending(rg, false)) == 0 || f.bringLocked(ctx, rg, false, true) != nil {
		return page.Range{} // what fails is noted
	}
	f.showLocked(rg)
	return rg
}
