package pagecache

import (
	"cmp"
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// settling is what became of the pieces that a device has.
type settling struct {
	mu sync.Mutex // of those who settle, on behalf of a caller who holds File.mu and waits
	// The rest is protected by mu.
	tracked, others            []page.Range // scratch
	filled, refreshed, patched int64
	from                       ways
}

// settle reports pieces that the device has. Others are being read, which need what is known of them: their bases and digests.
func (p *pipeline) settle(pieces []*piece) {
	s := &p.settling
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(pieces, func(a, b *piece) int { return cmp.Compare(a.steps[0].pages.Start, b.steps[0].pages.Start) })
	s.tracked, s.others = s.tracked[:0], s.others[:0]
	of := walk{h: p.h}
	for _, x := range pieces {
		x.done = true
		s.from.add(x.ways)
		sums := x.sums
		for k := range x.steps {
			t := &x.steps[k]
			if t.hashed() {
				of.each(t.pages, func(x *extent, part page.Range) { sums = sums[copy(x.agreeOn(part), sums):] })
			}
			list := &s.others
			if t.storing {
				list = &s.tracked
			}
			if *list == nil {
				*list = make([]page.Range, 0, len(pieces)*len(x.steps))
			}
			*list = page.AppendRange(*list, t.pages)
			switch n := t.pages.Len(); t.mode {
			case lrc.ModeFill:
				s.filled += n
			case lrc.ModeCopy:
				s.refreshed += n
			case lrc.ModePatch:
				s.patched += n
			}
		}
	}
	p.f.bases.vacate(p.plan.Updated(s.tracked, true))
	p.f.bases.vacate(p.plan.Updated(s.others, false))
}

// endLocked counts what was settled, with so many runs of pages that the device had nothing of. Nobody settles any more.
func (s *settling) endLocked(f *File, fills int64) {
	f.bases.sweep()
	f.countBases()
	f.count(func(c *Counters) {
		c.Fills.Add(fills)
		c.FilledPages.Add(s.filled)
		c.RefreshedPages.Add(s.refreshed)
		c.PatchedPages.Add(s.patched)
		c.CachedPages.Add(s.from.cached)
		c.DirectPages.Add(s.from.direct)
		c.BufferedPages.Add(s.from.buffered)
	})
}
