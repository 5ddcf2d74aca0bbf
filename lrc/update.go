package lrc

import (
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// update implements states.update.
func (rs *runs) update(
	ranges []page.Range, note func(s *state) Base, kind changeKind, fn func(s *state),
) (noted []PageBase) {
	changes := changes{rs: rs, note: note, fn: fn, runs: len(ranges)}
	if kind != unremembered {
		changes.known = &rs.known[kind]
	}
	var room [4]part
	parts := room[:0] // of the segment at place i
	i := -1
	flush := func() {
		if len(parts) > 0 {
			g := &rs.segments[i]
			before := g.memory()
			rs.updateSegment(g, parts, &changes)
			rs.tables += g.memory() - before
			parts = parts[:0]
		}
	}
	for _, rg := range ranges {
		for !rg.Empty() {
			number := int64(rg.Start) / segmentPages
			if i < 0 || i >= len(rs.segments) || rs.segments[i].number != number {
				flush()
				ok := false
				if i, ok = rs.find(number); !ok {
					gap := rs.gap(i, rg)
					if x := changes.of(initial); x.enc == string(initial) {
						changes.add(gap, x.base)
						rg.Start = gap.End
						continue
					}
					rs.insert(i, number, int64(gap.End-1)/segmentPages+1)
				}
			}
			first := firstPage(number)
			end := min(rg.End, first+segmentPages)
			if n := len(parts); n > 0 && parts[n-1].to == int(rg.Start-first) {
				parts[n-1].to = int(end - first)
			} else {
				parts = append(parts, part{int(rg.Start - first), int(end - first)})
			}
			rg.Start = end
		}
	}
	flush()
	return changes.noted
}

// insert makes the segments [from, to), which belong at place i.
func (rs *runs) insert(i int, from, to int64) {
	n := int(to - from)
	rs.segments = slices.Grow(rs.segments, n)[:len(rs.segments)+n]
	copy(rs.segments[i+n:], rs.segments[i:])
	for k := range n {
		rs.segments[i+k] = segment{number: from + int64(k)}
	}
}

// part is the pages [from, to) of a segment.
type part struct{ from, to int }

// changes caches the results of an update for the states that it met.
type changes struct {
	rs    *runs
	note  func(s *state) Base
	fn    func(s *state)
	known *transitions
	old   [memoStates]string
	made  [memoStates]change
	n     int // how many were made
	runs  int // that are updated
	noted []PageBase
}

// change is the result of an update for one state.
type change struct {
	enc  string
	to   uint16 // its number in the table of the segment, plus one
	base Base   // what was noted of it
}

// of returns the result of fn for the state that enc encodes.
func (c *changes) of(enc []byte) change {
	for i := range min(c.n, memoStates) {
		if c.old[i] == string(enc) {
			return c.made[i]
		}
	}
	if c.known != nil {
		if to, ok := (*c.known)[string(enc)]; ok {
			return change{enc: to}
		}
	}
	s := c.rs.decode(enc).clone()
	var x change
	if c.note != nil {
		x.base = c.note(s)
	}
	c.fn(s)
	from := string(enc)
	x.enc = string(s.encode(nil))
	if c.known != nil {
		if *c.known == nil {
			*c.known = make(transitions)
		} else if len(*c.known) == recentStates {
			clear(*c.known)
		}
		(*c.known)[from] = x.enc
	}
	i := c.n % memoStates
	c.old[i], c.made[i] = from, x
	c.n++
	return x
}

// add notes the pages of run.
func (c *changes) add(run page.Range, b Base) {
	if b == BaseHome {
		return
	}
	if n := len(c.noted); n > 0 && c.noted[n-1].Base == b && c.noted[n-1].Range.End == run.Start {
		c.noted[n-1].Range.End = run.End
		return
	}
	if c.noted == nil {
		c.noted = make([]PageBase, 0, c.runs)
	}
	c.noted = append(c.noted, PageBase{run, b})
}

// updateSegment applies c to the pages of parts.
func (rs *runs) updateSegment(g *segment, parts []part, c *changes) {
	if g.index == nil {
		rs.updateUniform(g, parts, c)
		return
	}
	// moved[i] is the result for state i. Added states belong to pages that are done.
	if cap(rs.moved) < len(g.ends) {
		rs.moved = make([]change, 2*len(g.ends))
	}
	first := firstPage(g.number)
	moved, find := rs.moved[:len(g.ends)], finder{g: g}
	clear(moved)
	for _, p := range parts {
		for i := p.from; i < p.to; {
			k := g.index[i]
			x := &moved[k]
			if x.to == 0 {
				*x = c.of(g.encoding(k))
				x.to = find.place(x.enc) + 1
			}
			j := i + 1
			for j < p.to && g.index[j] == k {
				j++
			}
			c.add(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, x.base)
			if n := x.to - 1; n != k {
				for at := i; at < j; at++ {
					g.index[at] = n
				}
				g.pages[k] -= uint16(j - i)
				g.pages[n] += uint16(j - i)
			}
			i = j
		}
	}
	rs.compact(g)
}

// updateUniform is updateSegment for a segment whose pages all agree.
func (rs *runs) updateUniform(g *segment, parts []part, c *changes) {
	first, old := firstPage(g.number), initial
	if g.uniform != "" {
		old = []byte(g.uniform)
	}
	x := c.of(old)
	for _, p := range parts {
		c.add(page.Range{Start: first + page.Index(p.from), End: first + page.Index(p.to)}, x.base)
	}
	enc := x.enc
	if enc == string(old) {
		return
	}
	if parts[0] == (part{0, segmentPages}) {
		g.uniform = rs.intern([]byte(enc))
		return
	}
	g.index = make([]uint16, segmentPages)
	g.blob = append(append(make([]byte, 0, len(old)+len(enc)), old...), enc...)
	g.ends = []uint32{uint32(len(old)), uint32(len(old) + len(enc))}
	g.uniform = ""
	n := 0
	for _, p := range parts {
		for i := p.from; i < p.to; i++ {
			g.index[i] = 1
		}
		n += p.to - p.from
	}
	g.pages = []uint16{uint16(segmentPages - n), uint16(n)}
}

// finder finds states in the table of a segment that is being updated: it searches the table for a few states, and uses
// a map for many.
type finder struct {
	g        *segment
	known    map[string]uint16
	distinct int // how many were asked for
}

// place returns the number of the state that enc encodes. It adds the state if it is missing.
func (x *finder) place(enc string) uint16 {
	g := x.g
	if x.distinct++; x.distinct == memoStates {
		x.known = make(map[string]uint16, 2*len(g.ends))
		for k := range g.ends {
			x.known[string(g.encoding(uint16(k)))] = uint16(k)
		}
	}
	if n, ok := x.find(enc); ok {
		return n
	}
	if x.known == nil {
		if n, ok := g.vacant(len(enc)); ok {
			copy(g.encoding(n), enc)
			return n
		}
	}
	n := g.add(enc)
	if x.known != nil {
		x.known[enc] = n
	}
	return n
}

func (x *finder) find(enc string) (uint16, bool) {
	if x.known != nil {
		k, ok := x.known[enc]
		return k, ok
	}
	for k := range x.g.ends {
		if string(x.g.encoding(uint16(k))) == enc {
			return uint16(k), true
		}
	}
	return 0, false
}
