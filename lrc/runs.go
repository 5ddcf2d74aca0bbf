package lrc

import (
	"bytes"
	"cmp"
	"slices"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
)

// segmentPages is the number of pages that share one table of states.
const segmentPages = 512

// segment is the states of segmentPages pages. While they all agree it is one encoding, shared with other segments;
// otherwise each page has an index into the segment's own table.
type segment struct {
	// number counts the segments of the file from 0.
	number int64
	// uniform is the encoding of every page's state while index is nil. "" stands for the initial state.
	uniform string
	// index has, per page, the number of its state in the table.
	index []uint16
	// The table: state i is encoded in blob[ends[i-1]:ends[i]], and so many pages have it.
	blob  []byte
	ends  []uint32
	pages []uint16
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
	// segments are in ascending order of their numbers. The pages of a segment that is not there have the initial state: a file
	// may be of 2^63 bytes, and a device hold a page at its end.
	segments []segment
	// tables is the memory of their tables.
	tables int64
	// interned keeps one string per uniform encoding in use, so that agreeing segments share it.
	interned map[string]string
	// recent has the states that were decoded last: one request after the other meets the same few, and with many devices a
	// state takes microseconds to decode.
	recent map[string]*state
	moved  []change // scratch of updateSegment
}

// recentStates is the most states of recent, and transitions of an event, that are remembered.
const recentStates = 16

// decode returns the state that enc encodes. It must not be changed.
func (rs *runs) decode(enc []byte) *state {
	if s := rs.recent[string(enc)]; s != nil {
		return s
	}
	if rs.recent == nil {
		rs.recent = make(map[string]*state)
	} else if len(rs.recent) == recentStates {
		clear(rs.recent)
	}
	s := decode(enc)
	s.settled = s.firstPending() == nil
	rs.recent[string(enc)] = s
	return s
}

// at returns the state of page p. It must not be changed.
func (rs *runs) at(p page.Index) *state {
	g := rs.segment(int64(p) / segmentPages)
	switch {
	case g == nil || g.index == nil && g.uniform == "":
		return rs.decode(initial)
	case g.index == nil:
		return rs.decode([]byte(g.uniform))
	}
	return rs.decode(g.encoding(g.index[p%segmentPages]))
}

// transitions remember, from one event of a kind to the next, what it makes of states, by their encodings. Events of single pages
// meet the same few again and again.
type transitions map[string]string

func (t transitions) memory() (n int64) {
	for from, to := range t {
		n += int64(len(from)+len(to)) + 48 // the strings, their headers, their share of the map
	}
	return n
}

var initial = (&state{cpu: true}).encode(nil)

// segment returns the segment with a number, nil if it is not there.
func (rs *runs) segment(number int64) *segment {
	if i, ok := rs.find(number); ok {
		return &rs.segments[i]
	}
	return nil
}

// find returns the place of the segment with a number, or the place where it belongs.
func (rs *runs) find(number int64) (i int, ok bool) {
	n := int64(len(rs.segments))
	if n == 0 {
		return 0, false
	}
	// Most often the segments follow each other.
	if at := number - rs.segments[0].number; at >= 0 && at < n && rs.segments[at].number == number {
		return int(at), true
	}
	return slices.BinarySearchFunc(rs.segments, number, func(g segment, number int64) int { return cmp.Compare(g.number, number) })
}

// firstPage returns the first page of a segment.
func firstPage(number int64) page.Index { return page.Index(number * segmentPages) }

// gap returns the pages of rg up to the segment at place i, which is the first behind rg.Start.
func (rs *runs) gap(i int, rg page.Range) page.Range {
	if i < len(rs.segments) {
		rg.End = min(rg.End, firstPage(rs.segments[i].number))
	}
	return rg
}

// split calls fn for the parts of rg in segments that are there, and missing for the pages between them, in order.
func (rs *runs) split(rg page.Range, missing func(gap page.Range), fn func(g *segment, from, to int)) {
	if rg.Empty() {
		return
	}
	i, ok := rs.find(int64(rg.Start) / segmentPages)
	for !rg.Empty() {
		if !ok {
			gap := rs.gap(i, rg)
			missing(gap)
			rg.Start, ok = gap.End, true
			continue
		}
		g := &rs.segments[i]
		first := firstPage(g.number)
		end := min(rg.End, first+segmentPages)
		fn(g, int(rg.Start-first), int(end-first))
		rg.Start = end
		i++
		ok = i < len(rs.segments) && rs.segments[i].number == g.number+1
	}
}

// memoStates is the number of states that a pass looks for one by one: most passes meet a few, again in every segment. Of
// more it keeps a map, of up to memoMost.
const (
	memoStates = 8
	memoMost   = 1024
)

// memo remembers what encodings stand for during one pass.
type memo struct {
	rs        *runs
	want      func(s *state) bool // nil for every state
	encodings [memoStates]string
	known     [memoStates]*meaning
	last      int // where the last one asked for is
	n         int // how many of them there are
	more      map[string]*meaning
}

// meaning is a state, and whether the pass is about it.
type meaning struct {
	state  *state
	wanted bool
}

// of returns what enc stands for. Equal encodings have the same pointer while they are remembered. The state must not
// be changed.
func (m *memo) of(enc []byte) *meaning {
	if m.last < m.n && string(enc) == m.encodings[m.last] {
		return m.known[m.last]
	}
	for i := range m.n {
		if string(enc) == m.encodings[i] {
			m.last = i
			return m.known[i]
		}
	}
	if x := m.more[string(enc)]; x != nil {
		return x
	}
	s := m.rs.decode(enc)
	x := &meaning{s, m.want == nil || m.want(s)}
	if m.n < memoStates {
		m.encodings[m.n], m.known[m.n] = string(enc), x
		m.n++
		return x
	}
	if m.more == nil || len(m.more) == memoMost {
		m.more = make(map[string]*meaning)
	}
	m.more[string(enc)] = x
	return x
}

// scan calls fn for the pages of rg, run by run of equal states, in order. fn must not keep or change the state.
// Neighbouring runs may have equal states.
func (rs *runs) scan(rg page.Range, fn func(run page.Range, s *state)) {
	rs.scanAll([]page.Range{rg}, nil, fn)
}

// scanWhere is scan for the pages whose states want reports true of. What has no such page costs little.
func (rs *runs) scanWhere(rg page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	rs.scanAll([]page.Range{rg}, want, fn)
}

// scanAll is scanWhere for the pages of ascending ranges, which do not overlap. A nil want wants all.
func (rs *runs) scanAll(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	if len(ranges) == 1 && ranges[0].Len() == 1 {
		if s := rs.at(ranges[0].Start); want == nil || want(s) {
			fn(ranges[0], s)
		}
		return
	}
	var (
		m           = memo{rs: rs, want: want}
		lastUniform string
		uniform     *meaning
	)
	// Runs are joined across segments, so that a large file that agrees is one run.
	var open page.Range
	var openState *state
	emit := func(run page.Range, s *state) {
		if s == openState && open.End == run.Start {
			open.End = run.End
			return
		}
		if openState != nil {
			fn(open, openState)
		}
		open, openState = run, s
	}
	agree := func(run page.Range, enc string) {
		if uniform == nil || enc != lastUniform {
			lastUniform = enc
			if enc == "" {
				uniform = m.of(initial)
			} else {
				uniform = m.of([]byte(enc))
			}
		}
		if uniform.wanted {
			emit(run, uniform.state)
		}
	}
	table, tableOf := []*meaning(nil), (*segment)(nil) // the states of segment tableOf, as far as they were needed
	for _, rg := range ranges {
		rs.split(rg, func(gap page.Range) { agree(gap, "") }, func(g *segment, from, to int) {
			first := firstPage(g.number)
			if g.index == nil {
				agree(page.Range{Start: first + page.Index(from), End: first + page.Index(to)}, g.uniform)
				return
			}
			if g != tableOf {
				// What happened to the one often happened to the next.
				if tableOf == nil || !g.sameTable(tableOf) {
					if cap(table) < len(g.ends) {
						table = make([]*meaning, len(g.ends))
					}
					table = table[:len(g.ends)]
					clear(table)
				}
				tableOf = g
			}
			index := g.index[:to]
			// The table tells whether there is anything in the segment, in fewer steps than its pages.
			if want != nil && to-from > len(table) {
				states, k := g.wanted(&m, table)
				if states == 0 {
					return
				}
				if states == 1 && k != 0 && len(table) <= 1<<8 {
					i := nextOf(index, from, k)
					if i == to {
						return
					}
					j := runEnd(index, i)
					emit(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, table[k].state)
					// None of the others touches the one before it.
					for i = nextOf(index, j, k); i < to; i = nextOf(index, j, k) {
						j = runEnd(index, i)
						fn(open, openState)
						open = page.Range{Start: first + page.Index(i), End: first + page.Index(j)}
					}
					return
				}
			}
			for i := from; i < len(index); {
				k := index[i]
				j := runEnd(index, i)
				if table[k] == nil {
					table[k] = m.of(g.encoding(k))
				}
				if x := table[k]; x.wanted {
					emit(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, x.state)
				}
				i = j
			}
		})
	}
	if openState != nil {
		fn(open, openState)
	}
}

// sameTable reports whether the numbers of g stand for the same states as those of o.
func (g *segment) sameTable(o *segment) bool {
	return bytes.Equal(g.blob, o.blob) && slices.Equal(g.ends, o.ends)
}

// wanted returns how many states that m wants pages of g have, and one of them. It fills in table as far as it had to look.
func (g *segment) wanted(m *memo, table []*meaning) (states int, one uint16) {
	for k, n := range g.pages {
		if n == 0 {
			continue
		}
		if table[k] == nil {
			table[k] = m.of(g.encoding(uint16(k)))
		}
		if table[k].wanted {
			states, one = states+1, uint16(k)
		}
	}
	return states, one
}

// nextOf returns the first place from i on where index has k, or its length. All of index is below 256, and k is not 0.
func nextOf(index []uint16, i int, k uint16) int {
	if i == len(index) {
		return i
	}
	// A number is a byte of 0 and one that is not, in either order: k is found in the latter. The bytes are those of index,
	// and are only read.
	b := unsafe.Slice((*byte)(unsafe.Pointer(&index[i])), 2*(len(index)-i))
	n := bytes.IndexByte(b, byte(k))
	if n < 0 {
		return len(index)
	}
	return i + n/2
}

// runEnd returns the end of the run of equal numbers that index[i] is in.
func runEnd(index []uint16, i int) int {
	k := index[i]
	for i++; i < len(index) && i%4 != 0; i++ {
		if index[i] != k {
			return i
		}
	}
	// Four at a time: the words are those of index, whose array begins at a multiple of 8, and are only read.
	for four := uint64(k) * 0x0001_0001_0001_0001; i+4 <= len(index); i += 4 {
		if *(*uint64)(unsafe.Pointer(&index[i])) != four {
			break
		}
	}
	for i < len(index) && index[i] == k {
		i++
	}
	return i
}

// update calls fn for the distinct states among the pages of rg, and stores what fn made of them. fn must make the same of
// the same state whenever it is called: what it made once may be taken again.
func (rs *runs) update(rg page.Range, fn func(s *state)) {
	rs.updateAll([]page.Range{rg}, nil, nil, fn)
}

// updateAll is update for the pages of ascending ranges, which do not overlap. Where note, unless it is nil, returns something
// else than BaseHome of a state before fn changes it, noted has the pages that had it, in order. known, unless it is nil, has
// what fn made of states before, and takes what it makes of others; there is no note then.
func (rs *runs) updateAll(ranges []page.Range, note func(s *state) Base, known *transitions, fn func(s *state)) (noted []PageBase) {
	changes := changes{rs: rs, note: note, fn: fn, known: known, runs: len(ranges)}
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

// changes remembers what an update made of the states it met.
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

// change is what became of a state.
type change struct {
	enc  string
	to   uint16 // its number in the table of the segment, plus one
	base Base   // what was noted of it
}

// of returns what fn makes of the state that enc encodes.
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

func (rs *runs) updateSegment(g *segment, parts []part, c *changes) {
	first := firstPage(g.number)
	if g.index == nil {
		old := initial
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
		return
	}

	// A few states are looked for in the table as it is, many by a map.
	var known map[string]uint16
	find := func(enc string) (uint16, bool) {
		if known != nil {
			k, ok := known[enc]
			return k, ok
		}
		for k := range g.ends {
			if string(g.encoding(uint16(k))) == enc {
				return uint16(k), true
			}
		}
		return 0, false
	}
	// What became of the state with a number. States that are added are of pages that are done.
	if cap(rs.moved) < len(g.ends) {
		rs.moved = make([]change, 2*len(g.ends))
	}
	moved, distinct := rs.moved[:len(g.ends)], 0
	clear(moved)
	for _, p := range parts {
		for i := p.from; i < p.to; {
			k := g.index[i]
			x := &moved[k]
			if x.to == 0 {
				if distinct++; distinct == memoStates {
					known = make(map[string]uint16, 2*len(g.ends))
					for k := range g.ends {
						known[string(g.encoding(uint16(k)))] = uint16(k)
					}
				}
				*x = c.of(g.encoding(k))
				n, ok := find(x.enc)
				if !ok && known == nil {
					if n, ok = g.vacant(len(x.enc)); ok {
						copy(g.encoding(n), x.enc)
					}
				}
				if !ok {
					n = g.add(x.enc)
					if known != nil {
						known[x.enc] = n
					}
				}
				x.to = n + 1
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

// vacant returns the number of a state that no page has and whose encoding has n bytes. What is changed again and again so
// leaves the table as long as it is.
func (g *segment) vacant(n int) (uint16, bool) {
	for k, pages := range g.pages {
		if pages == 0 && len(g.encoding(uint16(k))) == n {
			return uint16(k), true
		}
	}
	return 0, false
}

// add appends a state to the table. The table grows by small steps: that of a large file has many segments.
func (g *segment) add(enc string) uint16 {
	if n := len(g.ends); cap(g.ends) == n {
		room := n + max(4, n/16)
		g.ends = append(make([]uint32, 0, room), g.ends...)
		g.pages = append(make([]uint16, 0, room), g.pages...)
	}
	if need := len(g.blob) + len(enc); cap(g.blob) < need {
		g.blob = append(make([]byte, 0, need+max(len(enc), need/16)), g.blob...)
	}
	g.blob = append(g.blob, enc...)
	g.ends = append(g.ends, uint32(len(g.blob)))
	g.pages = append(g.pages, 0)
	return uint16(len(g.ends) - 1)
}

// garbage is the number of states without a page that a table of n states may have, so that a segment whose pages all
// differ is not rewritten for every page that changes.
func garbage(n int) int { return 8 + n/32 }

// compact drops the table where all pages agree again, and states that no page has any more when there are many.
func (rs *runs) compact(g *segment) {
	n := 0
	for _, pages := range g.pages {
		if pages > 0 {
			n++
		}
	}
	if n == 1 {
		enc := rs.intern(g.encoding(g.index[0]))
		*g = segment{number: g.number, uniform: enc}
		return
	}
	if len(g.ends)-n <= garbage(n) {
		return
	}
	renamed := make([]uint16, len(g.ends))
	var blob []byte
	ends, pages := make([]uint32, 0, n), make([]uint16, 0, n)
	for i, count := range g.pages {
		if count > 0 {
			renamed[i] = uint16(len(ends))
			blob = append(blob, g.encoding(uint16(i))...)
			ends, pages = append(ends, uint32(len(blob))), append(pages, count)
		}
	}
	for i, k := range g.index {
		g.index[i] = renamed[k]
	}
	g.blob, g.ends, g.pages = append(make([]byte, 0, len(blob)), blob...), ends, pages
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
func (rs *runs) end() page.Index {
	if n := len(rs.segments); n > 0 {
		return firstPage(rs.segments[n-1].number + 1)
	}
	return 0
}

// trim drops segments whose pages all have the initial state.
func (rs *runs) trim() {
	rs.segments = slices.DeleteFunc(rs.segments, func(g segment) bool { return g.index == nil && g.uniform == "" })
	if len(rs.segments) == 0 {
		rs.segments, rs.recent, rs.moved = nil, nil, nil
	}
}

// memory returns the bytes of the table.
func (g *segment) memory() int64 {
	return int64(cap(g.index))*2 + int64(cap(g.blob)) + int64(cap(g.ends))*4 + int64(cap(g.pages))*2
}

// memory returns the bytes that the states take.
func (rs *runs) memory() int64 {
	n := rs.tables + int64(cap(rs.segments))*int64(segmentSize)
	for _, s := range rs.interned {
		n += int64(len(s)) + 48 // the string, its header twice, its share of the map
	}
	for enc, s := range rs.recent {
		n += int64(len(enc)) + s.memory() + 32 // their share of the map
	}
	return n + int64(cap(rs.moved))*int64(unsafe.Sizeof(change{}))
}
