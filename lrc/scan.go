package lrc

import (
	"bytes"
	"slices"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
)

// memoStates is the number of states up to which a pass searches one by one: most passes meet a few states, the same in
// every segment. For more states it keeps a map, of up to memoMost.
const (
	memoStates = 8
	memoMost   = 1024
)

// memo caches what encodings stand for during one pass.
type memo struct {
	rs        *runs
	want      func(s *state) bool // nil for every state
	encodings [memoStates]string
	known     [memoStates]*meaning
	last      int // where the last one asked for is
	n         int // how many of them there are
	more      map[string]*meaning
}

// meaning is a state, and whether the pass wants it.
type meaning struct {
	state  *state
	wanted bool
}

// of returns what enc stands for. Equal encodings have the same pointer while they are cached. The state must not be
// changed.
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

// scan implements states.scan. Segments without a wanted page cost little.
func (rs *runs) scan(ranges []page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	if len(ranges) == 1 && ranges[0].Len() == 1 {
		if s := rs.at(ranges[0].Start); want == nil || want(s) {
			fn(ranges[0], s)
		}
		return
	}
	x := scanner{memo: memo{rs: rs, want: want}}
	for _, rg := range ranges {
		rs.split(rg, func(gap page.Range) {
			x.agree(gap, "", fn)
		}, func(g *segment, from, to int) {
			x.segment(g, from, to, fn)
		})
	}
	if x.openState != nil {
		fn(x.open, x.openState)
	}
}

// scanner is a pass over pages. The callback is an argument everywhere, because as a field it would cost an allocation.
type scanner struct {
	memo memo
	// open is a run that may go on: runs are joined across segments, so that a large file with equal states is one run.
	open      page.Range
	openState *state
	// uniform is what lastUniform stands for.
	lastUniform string
	uniform     *meaning
	// table has the decoded states of segment tableOf, as far as they were needed.
	table   []*meaning
	tableOf *segment
}

func (x *scanner) emit(run page.Range, s *state, fn func(run page.Range, s *state)) {
	if s == x.openState && x.open.End == run.Start {
		x.open.End = run.End
		return
	}
	if x.openState != nil {
		fn(x.open, x.openState)
	}
	x.open, x.openState = run, s
}

// agree scans pages that all have the state that enc encodes.
func (x *scanner) agree(run page.Range, enc string, fn func(run page.Range, s *state)) {
	if x.uniform == nil || enc != x.lastUniform {
		x.lastUniform = enc
		if enc == "" {
			x.uniform = x.memo.of(initial)
		} else {
			x.uniform = x.memo.of([]byte(enc))
		}
	}
	if x.uniform.wanted {
		x.emit(run, x.uniform.state, fn)
	}
}

// enter makes table the table of g. Neighbouring segments often have equal tables.
func (x *scanner) enter(g *segment) {
	if g == x.tableOf {
		return
	}
	if x.tableOf == nil || !g.sameTable(x.tableOf) {
		if cap(x.table) < len(g.ends) {
			x.table = make([]*meaning, len(g.ends))
		}
		x.table = x.table[:len(g.ends)]
		clear(x.table)
	}
	x.tableOf = g
}

// segment scans the pages [from, to) of g.
func (x *scanner) segment(g *segment, from, to int, fn func(run page.Range, s *state)) {
	first := firstPage(g.number)
	if g.index == nil {
		x.agree(page.Range{Start: first + page.Index(from), End: first + page.Index(to)}, g.uniform, fn)
		return
	}
	x.enter(g)
	index := g.index[:to]
	// The table shows in fewer steps than the pages whether the segment has a wanted state.
	if x.memo.want != nil && to-from > len(x.table) {
		states, k := g.wanted(&x.memo, x.table)
		if states == 0 {
			return
		}
		if states == 1 && k != 0 && len(x.table) <= 1<<8 {
			x.only(index, first, from, k, fn)
			return
		}
	}
	for i := from; i < len(index); {
		k := index[i]
		j := runEnd(index, i)
		if x.table[k] == nil {
			x.table[k] = x.memo.of(g.encoding(k))
		}
		if m := x.table[k]; m.wanted {
			x.emit(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, m.state, fn)
		}
		i = j
	}
}

// only scans a segment, whose first page is first, from its page from on. Only state k is wanted.
func (x *scanner) only(
	index []uint16, first page.Index, from int, k uint16, fn func(run page.Range, s *state),
) {
	i := nextOf(index, from, k)
	if i == len(index) {
		return
	}
	j := runEnd(index, i)
	x.emit(page.Range{Start: first + page.Index(i), End: first + page.Index(j)}, x.table[k].state, fn)
	// No later run touches the run before it.
	for i = nextOf(index, j, k); i < len(index); i = nextOf(index, j, k) {
		j = runEnd(index, i)
		fn(x.open, x.openState)
		x.open = page.Range{Start: first + page.Index(i), End: first + page.Index(j)}
	}
}

// sameTable reports whether the numbers of g stand for the same states as those of o.
func (g *segment) sameTable(o *segment) bool {
	return bytes.Equal(g.blob, o.blob) && slices.Equal(g.ends, o.ends)
}

// wanted returns how many of the states that m wants occur in g, and one of them. It fills in table as far as it had to
// look.
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
	// Each number is a byte of 0 and a byte that is not 0, in either order: k is found in the latter. The slice aliases
	// index, and is only read.
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
	// Four at a time: the words alias index, whose array begins at a multiple of 8, and are only read.
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
