package lrc

import (
	"bytes"

	"github.com/gaiafs/gaiafs/internal/page"
)

// segmentPages is the number of pages that share one table of states.
const segmentPages = 512

// segment is the states of segmentPages pages. While they all agree it is one encoding, shared with other segments;
// otherwise each page has an index into the segment's own table.
type segment struct {
	// uniform is the encoding of every page's state while index is nil. "" stands for the initial state.
	uniform string
	// index has, per page, the number of its state in the table.
	index []uint16
	// The table: state i is encoded in blob[ends[i-1]:ends[i]].
	blob []byte
	ends []uint32
}

func (g *segment) encoding(i uint16) []byte {
	start := uint32(0)
	if i > 0 {
		start = g.ends[i-1]
	}
	return g.blob[start:g.ends[i]]
}

// runs holds the states of all pages of a file. The initial state is that of pages that no device ever held: the
// kernel may hold them.
type runs struct {
	segments []segment
	// interned keeps one string per uniform encoding in use, so that agreeing segments share it.
	interned map[string]string
}

var initial = (&state{cpu: true}).encode(nil)

func (rs *runs) segment(i int64) *segment {
	if i < int64(len(rs.segments)) {
		return &rs.segments[i]
	}
	return nil
}

func split(rg page.Range, fn func(seg int64, from, to int)) {
	for p := rg.Start; p < rg.End; {
		seg := int64(p) / segmentPages
		first := page.Index(seg * segmentPages)
		end := min(rg.End, first+segmentPages)
		fn(seg, int(p-first), int(end-first))
		p = end
	}
}

// scan calls fn for the pages of rg, run by run of equal states, in order. fn must not keep or change the state.
// Neighbouring runs may have equal states.
func (rs *runs) scan(rg page.Range, fn func(run page.Range, s *state)) {
	var (
		lastEnc string
		last    *state
	)
	uniform := func(enc string) *state {
		if last == nil || enc != lastEnc {
			if enc == "" {
				last = &state{cpu: true}
			} else {
				last = decode([]byte(enc))
			}
			lastEnc = enc
		}
		return last
	}
	// Uniform runs are joined across segments, so that a large file that agrees is one run.
	open := page.Range{}
	var openState *state
	flush := func() {
		if !open.Empty() {
			fn(open, openState)
			open = page.Range{}
		}
	}
	split(rg, func(seg int64, from, to int) {
		first := page.Index(seg * segmentPages)
		g := rs.segment(seg)
		if g == nil || g.index == nil {
			enc := ""
			if g != nil {
				enc = g.uniform
			}
			run := page.Range{Start: first + page.Index(from), End: first + page.Index(to)}
			if !open.Empty() && openState != nil && enc == lastEnc && openState == last && open.End == run.Start {
				open.End = run.End
				return
			}
			flush()
			open, openState = run, uniform(enc)
			return
		}
		flush()
		memo := make(map[uint16]*state)
		for i := from; i < to; {
			k := g.index[i]
			j := i + 1
			for j < to && g.index[j] == k {
				j++
			}
			s := memo[k]
			if s == nil {
				s = decode(g.encoding(k))
				memo[k] = s
			}
			fn(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, s)
			i = j
		}
	})
	flush()
}

// update calls fn once for each distinct state among the pages of rg, per segment, and stores what fn made of it.
func (rs *runs) update(rg page.Range, fn func(s *state)) {
	split(rg, func(seg int64, from, to int) {
		for int64(len(rs.segments)) <= seg {
			rs.segments = append(rs.segments, segment{})
		}
		rs.updateSegment(&rs.segments[seg], from, to, fn)
	})
}

func (rs *runs) updateSegment(g *segment, from, to int, fn func(s *state)) {
	if g.index == nil {
		old := g.uniform
		if old == "" {
			old = string(initial)
		}
		s := decode([]byte(old))
		fn(s)
		enc := s.encode(nil)
		if string(enc) == old {
			return
		}
		if from == 0 && to == segmentPages {
			g.uniform = rs.intern(enc)
			return
		}
		g.index = make([]uint16, segmentPages)
		g.blob = append(append(make([]byte, 0, len(old)+len(enc)), old...), enc...)
		g.ends = []uint32{uint32(len(old)), uint32(len(old) + len(enc))}
		g.uniform = ""
		for i := from; i < to; i++ {
			g.index[i] = 1
		}
		return
	}

	// A few states are looked for in the table as it is, many by a map.
	var known map[string]uint16
	find := func(enc []byte) (uint16, bool) {
		if known != nil {
			k, ok := known[string(enc)]
			return k, ok
		}
		for k := range g.ends {
			if bytes.Equal(g.encoding(uint16(k)), enc) {
				return uint16(k), true
			}
		}
		return 0, false
	}
	moved := make(map[uint16]uint16)
	for i := from; i < to; i++ {
		k := g.index[i]
		n, ok := moved[k]
		if !ok {
			if len(moved) == 8 {
				known = make(map[string]uint16, 2*len(g.ends))
				for k := range g.ends {
					known[string(g.encoding(uint16(k)))] = uint16(k)
				}
			}
			s := decode(g.encoding(k))
			fn(s)
			enc := s.encode(nil)
			if n, ok = find(enc); !ok {
				n = g.add(enc)
				if known != nil {
					known[string(enc)] = n
				}
			}
			moved[k] = n
		}
		g.index[i] = n
	}
	rs.compact(g)
}

// add appends a state to the table. The table grows by small steps: that of a large file has many segments.
func (g *segment) add(enc []byte) uint16 {
	if cap(g.ends) == len(g.ends) {
		g.ends = append(make([]uint32, 0, len(g.ends)+max(4, len(g.ends)/16)), g.ends...)
	}
	if need := len(g.blob) + len(enc); cap(g.blob) < need {
		g.blob = append(make([]byte, 0, need+max(len(enc), need/16)), g.blob...)
	}
	g.blob = append(g.blob, enc...)
	g.ends = append(g.ends, uint32(len(g.blob)))
	return uint16(len(g.ends) - 1)
}

// garbage is the number of states without a page that a table of n states may have, so that a segment whose pages all
// differ is not rewritten for every page that changes.
func garbage(n int) int { return 8 + n/32 }

// compact drops the table where all pages agree again, and states that no page has any more when there are many.
func (rs *runs) compact(g *segment) {
	// At most one state a page, garbage, and a new state a page.
	var scratch [3 * segmentPages]bool
	used := scratch[:len(g.ends)]
	n := 0
	for _, k := range g.index {
		if !used[k] {
			used[k] = true
			n++
		}
	}
	if n == 1 {
		enc := rs.intern(g.encoding(g.index[0]))
		*g = segment{uniform: enc}
		return
	}
	if len(g.ends)-n <= garbage(n) {
		return
	}
	renamed := make([]uint16, len(g.ends))
	var blob []byte
	ends := make([]uint32, 0, n)
	for i := range g.ends {
		if used[i] {
			renamed[i] = uint16(len(ends))
			blob = append(blob, g.encoding(uint16(i))...)
			ends = append(ends, uint32(len(blob)))
		}
	}
	for i, k := range g.index {
		g.index[i] = renamed[k]
	}
	g.blob, g.ends = append(make([]byte, 0, len(blob)), blob...), ends
}

func (rs *runs) intern(enc []byte) string {
	if string(enc) == string(initial) {
		return ""
	}
	if s, ok := rs.interned[string(enc)]; ok {
		return s
	}
	if len(rs.interned) >= 1024 {
		rs.interned = nil // what is in use lives on in the segments; sharing starts again
	}
	if rs.interned == nil {
		rs.interned = make(map[string]string)
	}
	s := string(enc)
	rs.interned[s] = s
	return s
}

// end returns the first page past which every page has the initial state.
func (rs *runs) end() page.Index { return page.Index(len(rs.segments) * segmentPages) }

// trim drops segments at the end whose pages all have the initial state.
func (rs *runs) trim() {
	n := len(rs.segments)
	for n > 0 && rs.segments[n-1].index == nil && rs.segments[n-1].uniform == "" {
		n--
	}
	rs.segments = rs.segments[:n]
}

// memory returns the bytes that the states take.
func (rs *runs) memory() int64 {
	n := int64(cap(rs.segments)) * int64(segmentSize)
	for i := range rs.segments {
		g := &rs.segments[i]
		n += int64(cap(g.index))*2 + int64(cap(g.blob)) + int64(cap(g.ends))*4
	}
	for _, s := range rs.interned {
		n += int64(len(s)) + 48 // the string, its header twice, its share of the map
	}
	return n
}
