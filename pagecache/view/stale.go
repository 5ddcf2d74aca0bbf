package view

import (
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Stale is the pages of a file that a view lacks as they are now: at first, all that it has bytes of. Its methods may be
// called from any goroutine.
type Stale struct {
	file   *File   // immutable
	chunks []int64 // ascending; immutable

	mu sync.Mutex
	// sets has the stale pages of each chunk: nil for none, whole for all. Protected by mu.
	sets []*pageSet
}

// whole stands for a chunk of which all pages are stale.
var whole = new(pageSet)

// NewStale returns what is stale of a view that has nothing of the file yet.
func NewStale(f *File) *Stale {
	s := &Stale{file: f, chunks: f.chunks()}
	s.sets = slices.Repeat([]*pageSet{whole}, len(s.chunks))
	return s
}

// Memory returns about how many bytes of host memory the set takes, without pages that are stale one by one.
func (s *Stale) Memory() int64 { return int64(len(s.chunks)) * 16 }

// within returns the numbers in chunks of those that overlap rg.
func (s *Stale) within(rg page.Range) (first, end int) {
	if rg.Empty() {
		return 0, 0
	}
	first, _ = slices.BinarySearch(s.chunks, int64(rg.Start>>chunkShift))
	end, _ = slices.BinarySearch(s.chunks, int64((rg.End-1)>>chunkShift)+1)
	return first, end
}

// Mark makes the pages of rg stale. It may take others for stale that the view has nothing of.
func (s *Stale) Mark(rg page.Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, end := s.within(rg)
	for i := first; i < end; i++ {
		all := chunk(s.chunks[i])
		part := rg.Intersect(all)
		switch {
		case s.sets[i] == whole:
		case part == all:
			s.sets[i] = whole
		default:
			if s.sets[i] == nil {
				s.sets[i] = new(pageSet)
			}
			s.sets[i].add(part, all.Start)
		}
	}
}

// Take returns the stale pages of rg that the view has bytes of, ascending, and takes them for fresh from now on. It stops
// once it has found so many pages, or a sixteenth as many ranges, a chunk more or less; next is the page up to which it
// came.
func (s *Stale) Take(rg page.Range, most int64) (stale []page.Range, next page.Index) {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := int64(0)
	first, end := s.within(rg)
	for i := first; i < end; i++ {
		if s.sets[i] == nil {
			continue
		}
		all := chunk(s.chunks[i])
		part := rg.Intersect(all)
		if count >= most || count > 0 && int64(len(stale)) >= most/16 {
			return stale, part.Start
		}
		set := s.file.has(part, all.Start)
		if s.sets[i] != whole {
			set.and(s.sets[i])
		}
		stale, count = set.appendRanges(stale, all.Start), count+set.len()
		s.takeLocked(i, part, all)
	}
	return stale, rg.End
}

// takeLocked takes the pages part of chunk i, which has the pages all, out of its set.
func (s *Stale) takeLocked(i int, part, all page.Range) {
	if part == all {
		s.sets[i] = nil
		return
	}
	if s.sets[i] == whole {
		s.sets[i] = new(pageSet)
		s.sets[i].add(all, all.Start)
	}
	var gone pageSet
	gone.add(part, all.Start)
	if !s.sets[i].minus(&gone) {
		s.sets[i] = nil
	}
}

// Fresh reports whether no page is stale that the view has bytes of, as far as that is known without looking closely.
func (s *Stale) Fresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(s.sets, func(set *pageSet) bool { return set != nil })
}
