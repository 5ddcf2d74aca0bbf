package view

import "github.com/gaiafs/gaiafs/internal/page"

// Counts is how many pages of a part of a file have bytes in a view, and how many of them are stale or still coming.
type Counts struct{ Pages, Stale int64 }

// Count adds to each part the pages of width pages of the file, in order from its start. Pages in gone do not count.
func (s *State) Count(width page.Index, gone []page.Range, parts []Counts) {
	for i, number := range s.sections {
		all := section(number)
		has := s.file.has(all, all.Start)
		for _, rg := range gone {
			if rg.Overlaps(all) {
				has.bitmap().remove(rg.Intersect(all), all.Start)
			}
		}
		stale, coming := has, has
		s.mu.Lock()
		s.stale.and(i, &stale)
		s.coming.and(i, &coming)
		s.mu.Unlock()
		stale.bitmap().or(coming.bitmap())
		for k := all.Start / width; k < page.Index(len(parts)) && k*width < all.End; k++ {
			rg := page.Range{Start: k * width, End: (k + 1) * width}.Intersect(all)
			parts[k].Pages += has.bitmap().lenOf(rg, all.Start)
			parts[k].Stale += stale.bitmap().lenOf(rg, all.Start)
		}
	}
}

// Bytes returns how many bytes of the view come from the file.
func (f *File) Bytes() (n int64) {
	for _, i := range f.order {
		n += f.l.segments[i].bytes()
	}
	return n
}
