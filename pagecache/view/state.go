package view

import (
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
)

// State is what a view has of the pages of one file. Those that it has bytes of are stale at first; somebody takes them
// in order to bring them, and from then on they are coming; then they have arrived. A page that changes is stale again,
// whether it has arrived or is coming. Its methods may be called from any goroutine.
type State struct {
	file   *File   // immutable
	chunks []int64 // ascending; immutable

	mu     sync.Mutex
	stale  chunkSets     // protected by mu
	coming chunkSets     // protected by mu
	turn   uint64        // of those that are coming; protected by mu
	moved  chan struct{} // closed when some arrive, or do not; nil while nobody waits. Protected by mu
}

// NewState returns the state of a view that has nothing of the file yet.
func NewState(f *File) *State {
	s := &State{file: f, chunks: f.chunks()}
	s.stale, s.coming = slices.Repeat(chunkSets{whole}, len(s.chunks)), make(chunkSets, len(s.chunks))
	return s
}

// stateChunk is the bytes that a chunk takes.
const stateChunk = 24

// parts calls do for the part of rg in each chunk, until it returns false.
func (s *State) parts(rg page.Range, do func(i int, part, all page.Range) bool) {
	if rg.Empty() {
		return
	}
	first, _ := slices.BinarySearch(s.chunks, int64(rg.Start>>chunkShift))
	end, _ := slices.BinarySearch(s.chunks, int64((rg.End-1)>>chunkShift)+1)
	for i := first; i < end; i++ {
		all := chunk(s.chunks[i])
		if !do(i, rg.Intersect(all), all) {
			return
		}
	}
}

// Mark makes the pages of rg stale. It may take others for stale that the view has nothing of.
func (s *State) Mark(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		s.stale.add(i, part, all)
		return true
	})
}

// Take returns the stale pages of rg that the view has bytes of, ascending, for the caller to bring. They are coming
// from now on. It stops once it has found so many pages, or a sixteenth as many ranges, a chunk more or less; next is
// the page up to which it came. turn grows from call to call, of all views of the file. None may be coming yet.
func (s *State) Take(rg page.Range, most int64, turn uint64) (taken []page.Range, next page.Index) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turn, next = turn, rg.End
	count := int64(0)
	s.parts(rg, func(i int, part, all page.Range) bool {
		if s.stale[i] == nil {
			return true
		}
		if count >= most || count > 0 && int64(len(taken)) >= most/16 {
			next = part.Start
			return false
		}
		set := s.file.has(part, all.Start)
		s.stale.and(i, &set)
		if n := set.len(); n > 0 {
			taken, count = set.appendRanges(taken, all.Start), count+n
			s.coming[i] = &set
		}
		s.stale.remove(i, part, all)
		return true
	})
	return taken, next
}

// Arrived says that pages which were taken have come.
func (s *State) Arrived(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts(rg, func(i int, part, all page.Range) bool {
		if s.coming[i] != nil {
			s.coming.remove(i, part, all)
		}
		return true
	})
	s.wakeLocked()
}

// GaveUp says that nobody brings the pages any more that are coming: they are stale.
func (s *State) GaveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, set := range s.coming {
		if set == nil || set == whole {
			continue
		}
		if s.stale[i] == nil {
			s.stale[i] = set
		} else if s.stale[i] != whole {
			s.stale[i].or(set)
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

// Split divides pages by what the view has of them: those that are there, and those that are coming and were taken
// before turn, so that whoever took others in that turn may wait for them. It has neither of them lack. moved is closed
// when some of the coming ones arrive, or do not.
func (s *State) Split(pages []page.Range, turn uint64) (there, coming, lack []page.Range, moved <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rg := range pages {
		at := rg.Start
		s.parts(rg, func(i int, part, all page.Range) bool {
			if at < part.Start { // no chunk: the view has nothing there
				lack = page.AppendRange(lack, page.Range{Start: at, End: part.Start})
			}
			at = part.End
			var stale, on, rest pageSet
			rest.add(part, all.Start)
			stale, on = rest, rest
			s.stale.and(i, &stale)
			s.coming.and(i, &on)
			if s.turn >= turn {
				stale.or(&on) // not to be waited for
			}
			on.minus(&stale)
			rest.minus(&stale)
			rest.minus(&on)
			there, coming, lack = rest.appendRanges(there, all.Start), on.appendRanges(coming, all.Start), stale.appendRanges(lack, all.Start)
			return true
		})
		lack = page.AppendRange(lack, page.Range{Start: at, End: rg.End})
	}
	if s.moved == nil {
		s.moved = make(chan struct{})
	}
	return there, coming, lack, s.moved
}

// Fresh reports whether no page is stale or coming. Pages count that the view has no bytes of, where they were marked.
func (s *State) Fresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	some := func(set *pageSet) bool { return set == whole || set != nil && set.len() > 0 }
	return !slices.ContainsFunc(s.stale, some) && !slices.ContainsFunc(s.coming, some)
}

// chunkSets is pages, chunk by chunk: nil for none, whole for all.
type chunkSets []*pageSet

// whole stands for a chunk of which all pages are in the set.
var whole = new(pageSet)

// add adds the pages part of chunk i, which has the pages all.
func (c chunkSets) add(i int, part, all page.Range) {
	switch {
	case c[i] == whole:
	case part == all:
		c[i] = whole
	default:
		if c[i] == nil {
			c[i] = new(pageSet)
		}
		c[i].add(part, all.Start)
	}
}

// remove takes the pages part out of chunk i.
func (c chunkSets) remove(i int, part, all page.Range) {
	if part == all {
		c[i] = nil
		return
	}
	if c[i] == whole {
		c[i] = new(pageSet)
		c[i].add(all, all.Start)
	}
	c[i].remove(part, all.Start)
}

// and leaves in set what is in chunk i, too.
func (c chunkSets) and(i int, set *pageSet) {
	switch c[i] {
	case whole:
	case nil:
		*set = pageSet{}
	default:
		set.and(c[i])
	}
}
