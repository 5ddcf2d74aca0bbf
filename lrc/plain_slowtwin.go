//go:build slowtwin

package lrc

import (
	"maps"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// plain is the slow twin of runs: the simplest storage, with a state for each page. Nothing is shared, joined, encoded
// or cached.
type plain struct {
	pages map[page.Index]*state // but for those in the initial state
}

var _ states = (*plain)(nil)

func (m *plain) at(p page.Index) *state {
	if s := m.pages[p]; s != nil {
		return s
	}
	return &state{cpu: true}
}

// each calls own for the pages of rg that have a stored state, and gap for the runs between them, in order.
func (m *plain) each(rg page.Range, own func(p page.Index), gap func(run page.Range)) {
	at := rg.Start
	for _, p := range slices.Sorted(maps.Keys(m.pages)) {
		if p < rg.Start || p >= rg.End {
			continue
		}
		if at < p {
			gap(page.Range{Start: at, End: p})
		}
		own(p)
		at = p + 1
	}
	if at < rg.End {
		gap(page.Range{Start: at, End: rg.End})
	}
}

func (m *plain) end() (end page.Index) {
	for p := range m.pages {
		end = max(end, p+1)
	}
	return end
}

func (m *plain) next(p page.Index) page.Index {
	next := maxPage
	for q := range m.pages {
		if q >= p {
			next = min(next, q)
		}
	}
	return next
}

func (m *plain) scan(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	visit := func(run page.Range) {
		if s := m.at(run.Start); want == nil || want(s) {
			fn(run, s)
		}
	}
	for _, rg := range ranges {
		m.each(rg, func(p page.Index) { visit(page.Range{Start: p, End: p + 1}) }, visit)
	}
}

func (m *plain) update(
	ranges []page.Range, note func(s *state) Base, _ changeKind, fn func(s *state),
) (noted []PageBase) {
	change := func(p page.Index) {
		s := m.at(p).clone()
		if note != nil {
			noted = appendNoted(noted, p, note(s))
		}
		if fn(s); s.initial() {
			delete(m.pages, p)
			return
		}
		if m.pages == nil {
			m.pages = make(map[page.Index]*state)
		}
		m.pages[p] = s
	}
	for _, rg := range ranges {
		m.each(rg, change, func(gap page.Range) {
			// Unchanged pages are not stored: the gap may be larger than any memory.
			s := &state{cpu: true}
			if fn(s); s.initial() && (note == nil || note(&state{cpu: true}) == BaseHome) {
				return
			}
			for p := gap.Start; p < gap.End; p++ {
				change(p)
			}
		})
	}
	return noted
}

func appendNoted(noted []PageBase, p page.Index, b Base) []PageBase {
	if b == BaseHome {
		return noted
	}
	if n := len(noted); n > 0 && noted[n-1].Base == b && noted[n-1].Range.End == p {
		noted[n-1].Range.End++
		return noted
	}
	return append(noted, PageBase{page.Range{Start: p, End: p + 1}, b})
}

// initial reports whether s is the state of pages that no device ever held.
func (s *state) initial() bool {
	return s.cpu && len(s.replicas) == 0 && s.released.Len() == 0 && s.home.Len() == 0
}

func (m *plain) trim()            {}
func (m *plain) memory() int64    { return 0 }
func (m *plain) estimate() int64  { return 0 }
func (m *plain) check(page.Range) {}
