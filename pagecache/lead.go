package pagecache

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

const (
	// leadShare is the part of the memory for flights that programs reading one file in order share: one fourth, 32
	// MiB. mostLead is the most pages that are brought ahead for one of them, 16 MiB, and mostLeads the most that are
	// followed. Including the pages that one call adds, leads take at most half of the memory for flights.
	leadShare = 4
	mostLead  = 2 * mostCollectingReadPages
	mostLeads = 16
	// flightPortion is the number of pages in a portion that flies, 2 MiB. This is the size of the buffers for loads,
	// so flights use the same buffers, and memory that has been read is given back soon.
	flightPortion = mover.PieceBytes >> page.Shift
)

// lead is a range that was brought ahead for a program that reads in order. Leads that meet become one.
type lead struct {
	pages page.Range // brought; the first ones may have landed
	at    page.Index // the page up to which programs have read
	read  int64      // leads.reads at the last read
	asked bool       // more pages are to come
}

// leads has the leads of a file. They do not overlap. flights.mu protects them. Adding and removing one also needs
// File.mu.
type leads struct {
	list  []lead
	reads int64 // counts reads
}

// share returns how many pages to keep ahead of each lead's programs, if all leads together may have all.
func (l *leads) share(all page.Index) page.Index {
	return max(min(all/page.Index(max(len(l.list), 1)), mostLead), leastFlight)
}

// step returns how many pages to bring at once for a lead: whole portions, or the lead's share if that is less.
func (l *leads) step(all page.Index) page.Index {
	share := l.share(all)
	return min(max(share/2/flightPortion, 1)*flightPortion, share)
}

// readLocked notes a read of flying pages and reports whether the caller should bring more.
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

// followLocked adds a lead for rg, of which programs have read up to at. Reads of it then ask for the pages after it. A
// lead that meets rg is joined with it. If there are too many, the least recently read lead goes.
func (l *leads) followLocked(rg page.Range, at page.Index) {
	l.reads++
	now := lead{pages: rg, at: at, read: l.reads}
	l.list = slices.DeleteFunc(l.list, func(x lead) bool {
		if x.pages.End < now.pages.Start || x.pages.Start > now.pages.End {
			return false
		}
		if x.pages.Start <= rg.Start && x.pages.End > rg.End {
			return true // rg was released again after x was brought
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

// moreLocked returns the pages that a lead asked for, if any. The caller must then call broughtLocked.
func (l *leads) moreLocked(all page.Index) (more page.Range) {
	for _, x := range l.list {
		if x.asked {
			n := min(2*page.Index(x.pages.Len()), l.step(all))
			return page.Range{Start: x.pages.End, End: x.pages.End + n}
		}
	}
	return page.Range{}
}

// broughtLocked notes that rg of the range that moreLocked returned now flies. If rg is empty, the lead ends.
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

// asksForMore notes a read of flying pages and reports whether the pages after them are to be brought.
func (f *File) asksForMore(rg page.Range) bool {
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	return f.flights.leads.readLocked(rg, f.c.mostAhead())
}

// mostAhead returns how many pages may fly ahead of the programs that read one file in order.
func (c *Cache) mostAhead() page.Index { return page.Index(c.mostAloft() / leadShare >> page.Shift) }

// bringMoreLocked brings the next pages for one lead that asked, and reports whether there was one.
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

// aheadLocked returns the pages to bring from devices for a read of rg: see collectingRuns. If they are to fly, it
// returns at most one step of a lead.
func (f *File) aheadLocked(rg page.Range, fly bool) page.Range {
	most := page.Index(mostCollectingReadPages)
	if fly {
		f.flights.mu.Lock()
		most = f.flights.leads.step(f.c.mostAhead())
		f.flights.mu.Unlock()
	}
	return f.collectingRuns.from(rg, most).Intersect(f.fileRangeLocked())
}

// followLocked adds a lead for rg, which was just brought. Programs have read up to at. It does nothing unless pages of
// rg fly.
func (f *File) followLocked(rg page.Range, at page.Index) {
	if !f.flights.overlap(rg) {
		return
	}
	f.showLocked(rg)
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	f.flights.leads.followLocked(rg, at)
}

// forgetLeadsLocked is called when reads pause. Then leads of programs that went away no longer take a share.
func (f *File) forgetLeadsLocked() {
	f.flights.mu.Lock()
	defer f.flights.mu.Unlock()
	f.flights.leads.list = nil
}

// bringAheadLocked makes released pages of rg fly for a program that will read them next, and returns the range. Pages
// that cannot fly stay on their devices.
func (f *File) bringAheadLocked(ctx context.Context, rg page.Range) (brought page.Range) {
	rg = f.aheadLocked(rg, true)
	for f.flights.any() && !f.c.roomToFly(rg.Bytes()) {
		if f.landSomeLocked() != nil {
			return page.Range{}
		}
	}
	if len(f.lrc.Pending(rg, false)) == 0 || f.bringLocked(ctx, rg, false, true) != nil {
		return page.Range{} // bringLocked noted the error
	}
	f.showLocked(rg)
	return rg
}
