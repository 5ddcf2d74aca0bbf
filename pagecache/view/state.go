package view

import (
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
)

// State tracks the pages of one file in a view. At first all pages with bytes of the view are stale. A fill takes stale
// pages to bring them: then they are coming, and later they have arrived. A page that changes is stale again, even
// while it is coming. The methods of State may be called from any goroutine.
//
// A reader of the file claims coming pages here before it reads them, for this view or for another one. It alone brings
// the claimed pages until it reports that they have arrived, or that it does not bring them. So older bytes never
// arrive after newer ones. Pages that became stale after Take cannot be claimed: the taker has not decided where their
// bytes are. Home may lack bytes of them that the view already has.
type State struct {
	file     *File   // immutable
	sections []int64 // ascending; immutable

	mu      sync.Mutex
	stale   sectionSets   // protected by mu
	coming  sectionSets   // protected by mu
	claimed sectionSets   // a subset of coming; protected by mu
	turn    uint64        // of the coming pages; protected by mu
	room    bitmap        // memory for Claim; protected by mu
	moved   chan struct{} // closed when pages arrive or are given up; nil while nobody waits. Protected by mu
}

// NewState returns the state of a view that has no bytes of the file yet.
func NewState(f *File) *State {
	s := &State{file: f, sections: f.sections()}
	s.stale, s.coming = slices.Repeat(sectionSets{whole}, len(s.sections)), make(sectionSets, len(s.sections))
	s.claimed = make(sectionSets, len(s.sections))
	return s
}

// stateSection is the number of bytes that a section takes.
const stateSection = 32

// parts calls do for the part of rg in each section, until do returns false.
func (s *State) parts(rg page.Range, do func(i int, part, all page.Range) bool) {
	if rg.Empty() {
		return
	}
	first, _ := slices.BinarySearch(s.sections, int64(rg.Start>>sectionShift))
	end, _ := slices.BinarySearch(s.sections, int64((rg.End-1)>>sectionShift)+1)
	for i := first; i < end; i++ {
		all := section(s.sections[i])
		if !do(i, rg.Intersect(all), all) {
			return
		}
	}
}

// Mark makes the pages of rg stale. It may also mark pages of which the view has no bytes.
func (s *State) Mark(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		s.stale.add(i, part, all)
		return true
	})
}

// Take returns the stale pages of rg that have bytes of the view, ascending, for the caller to bring, and their number.
// They are coming from now on. A range may include gaps of up to gap pages, at most 64, of which the view has no bytes:
// rows of a large file are hundreds of thousands of ranges otherwise. Take stops after the section with which it has
// most pages, or so many ranges of them; next is the page up to which it came. turn grows from call to call, across all
// views of the file. No page may be coming yet.
func (s *State) Take(rg page.Range, most, runs, gap int64,
	turn uint64) (taken []page.Range, pages int64, next page.Index) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turn, next = turn, rg.End
	s.parts(rg, func(i int, part, all page.Range) bool {
		if s.stale[i] == nil {
			return true
		}
		if pages >= most || pages > 0 && int64(len(taken)) >= runs {
			next = part.Start
			return false
		}
		has := s.file.has(part, all.Start)
		set := has
		s.stale.and(i, &set)
		if n := set.bitmap().len(); n > 0 {
			has.bitmap().minus(set.bitmap()) // pages that a gap must not cover
			taken, pages = set.bitmap().appendBridged(taken, has.bitmap(), gap, all.Start), pages+n
			s.coming[i] = &set // nothing was coming
		}
		s.stale.remove(i, part, all)
		return true
	})
	return taken, pages, next
}

// Claim claims the coming pages of rg that are not claimed yet, and returns them, ascending. The caller brings them,
// and then calls Arrived or Return. A range may include gaps of up to gap pages, at most 64, of which the view has no
// bytes.
func (s *State) Claim(rg page.Range, gap int64) (claimed []page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		// Claims of all views of a file wait for each other, so this looks only at the words of part.
		first := part.Start &^ 63
		at, n := int(first-all.Start)>>6, int(part.End-first+63)>>6
		s.room = slices.Grow(s.room[:0], 3*n)[:3*n]
		clear(s.room)
		has, set, busy := s.room[:n], s.room[n:2*n], s.room[2*n:]
		s.claimed.read(i, at, busy)
		s.coming.read(i, at, set)
		set.minus(busy)
		if set.none(part, first) {
			return true // nothing of part is coming, or others bring it
		}
		s.file.addTo(has, part, first)
		set.and(has)
		s.claimed.or(i, at, set)
		has.minus(set) // pages that a gap must not cover
		claimed = set.appendBridged(claimed, has, gap, first)
		return true
	})
	return claimed
}

// Return gives up claimed pages of rg: the caller does not bring them. Others may claim them.
func (s *State) Return(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		if s.claimed[i] != nil {
			s.claimed.remove(i, part, all)
		}
		return true
	})
}

// Coming returns the pages that are coming, ascending.
func (s *State) Coming() (list []page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, set := range s.coming {
		switch all := section(s.sections[i]); set {
		case nil:
		case whole:
			list = page.AppendRange(list, all)
		default:
			list = set.bitmap().appendRanges(list, all.Start)
		}
	}
	return list
}

// Arrived notes that taken pages have arrived.
func (s *State) Arrived(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		for _, sets := range []sectionSets{s.coming, s.claimed} {
			if sets[i] != nil {
				sets.remove(i, part, all)
			}
		}
		return true
	})
	s.wakeLocked()
}

// GaveUp makes the coming pages stale: nobody brings them. None may be claimed.
func (s *State) GaveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.claimed)
	for i, set := range s.coming {
		if set == nil || set == whole {
			continue
		}
		if s.stale[i] == nil {
			s.stale[i] = set
		} else if s.stale[i] != whole {
			s.stale[i].bitmap().or(set.bitmap())
		}
		s.coming[i] = nil
	}
	s.wakeLocked()
}

func (s *State) wakeLocked() {
	if s.moved != nil {
		close(s.moved)
		s.moved = nil
	}
}

// Split divides pages by their state: pages that are there; pages that are coming and were taken before turn, so that
// the taker of that turn may wait for them; and pages that are neither (lack). moved is closed when coming pages arrive
// or are given up.
func (s *State) Split(pages []page.Range, turn uint64) (there, coming, lack []page.Range, moved <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rg := range pages {
		at := rg.Start
		s.parts(rg, func(i int, part, all page.Range) bool {
			if at < part.Start { // the view has no section there, so no bytes
				lack = page.AppendRange(lack, page.Range{Start: at, End: part.Start})
			}
			at = part.End
			var stale, on, rest pageSet
			rest.bitmap().add(part, all.Start)
			stale, on = rest, rest
			s.stale.and(i, &stale)
			s.coming.and(i, &on)
			if s.turn >= turn {
				stale.bitmap().or(on.bitmap()) // the caller must not wait for these
			}
			on.bitmap().minus(stale.bitmap())
			rest.bitmap().minus(stale.bitmap())
			rest.bitmap().minus(on.bitmap())
			there = rest.bitmap().appendRanges(there, all.Start)
			coming = on.bitmap().appendRanges(coming, all.Start)
			lack = stale.bitmap().appendRanges(lack, all.Start)
			return true
		})
		lack = page.AppendRange(lack, page.Range{Start: at, End: rg.End})
	}
	if s.moved == nil {
		s.moved = make(chan struct{})
	}
	return there, coming, lack, s.moved
}

// Fresh reports whether no page is stale or coming. It counts marked pages even if the view has no bytes of them.
func (s *State) Fresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	some := func(set *pageSet) bool { return set == whole || set != nil && set.bitmap().len() > 0 }
	return !slices.ContainsFunc(s.stale, some) && !slices.ContainsFunc(s.coming, some)
}

// sectionSets has a set of pages for each section: nil for none, whole for all.
type sectionSets []*pageSet

// whole stands for a section with all pages in the set.
var whole = new(pageSet)

// add adds part to section i, which has the pages all.
func (c sectionSets) add(i int, part, all page.Range) {
	switch {
	case c[i] == whole:
	case part == all:
		c[i] = whole
	default:
		if c[i] == nil {
			c[i] = new(pageSet)
		}
		c[i].bitmap().add(part, all.Start)
	}
}

// remove removes part from section i.
func (c sectionSets) remove(i int, part, all page.Range) {
	if part == all {
		c[i] = nil
		return
	}
	c.separate(i)
	c[i].bitmap().remove(part, all.Start)
}

// separate gives section i a set of its own if it is whole, so that pages can be removed.
func (c sectionSets) separate(i int) {
	if c[i] == whole {
		all := section(0)
		c[i] = new(pageSet)
		c[i].bitmap().add(all, all.Start)
	}
}

// and removes the pages from set that are not in section i.
func (c sectionSets) and(i int, set *pageSet) {
	switch c[i] {
	case whole:
	case nil:
		*set = pageSet{}
	default:
		set.bitmap().and(c[i].bitmap())
	}
}

// read copies words of section i, beginning with word at, into to, which has zeros.
func (c sectionSets) read(i, at int, to bitmap) {
	switch c[i] {
	case whole:
		for k := range to {
			to[k] = ^uint64(0)
		}
	case nil:
	default:
		copy(to, c[i][at:])
	}
}

// or adds pages to section i; their first word is word at of the section.
func (c sectionSets) or(i, at int, pages bitmap) {
	switch c[i] {
	case whole:
		return
	case nil:
		c[i] = new(pageSet)
	}
	bitmap(c[i][at:]).or(pages)
}
