package lrc

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
)

// runs keeps states in segments of pages. Pages of a segment with equal states share one encoding.
type runs struct {
	// segments are in ascending order of their numbers. Pages of a missing segment have the initial state: a file may
	// have 2^63 bytes, and a device may hold only its last page.
	segments []segment
	// tables is the memory of their tables.
	tables int64
	// interned keeps one string per uniform encoding in use, so that agreeing segments share it.
	interned map[string]string
	// recent caches the states that were decoded last: successive requests meet the same few states, and with many
	// devices a state takes microseconds to decode.
	recent map[string]*state
	moved  []change // scratch of updateSegment
	// known caches, for each kind of change, its results.
	known [unremembered]transitions
}

// recentStates is the limit of recent, and of the cached transitions of each kind of change.
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
	s.nonePending = s.firstPending() == nil
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

// transitions caches the results of one kind of change, from encoding to encoding. Changes of single pages meet the
// same few states again and again.
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
	return slices.BinarySearchFunc(rs.segments, number, func(g segment,
		number int64) int {
		return cmp.Compare(g.number, number)
	})
}

// firstPage returns the first page of a segment.
func firstPage(number int64) page.Index { return page.Index(number * segmentPages) }

// gap returns the pages of rg up to the segment at place i, which is the first one after rg.Start.
func (rs *runs) gap(i int, rg page.Range) page.Range {
	if i < len(rs.segments) {
		rg.End = min(rg.End, firstPage(rs.segments[i].number))
	}
	return rg
}

// split calls fn for the parts of rg in existing segments, and missing for the pages between them, in order.
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

// next returns p if its segment exists, or the first page of the first segment after p; maxPage if there is none.
func (rs *runs) next(p page.Index) page.Index {
	i, there := rs.find(int64(p) / segmentPages)
	switch {
	case there:
		return p
	case i == len(rs.segments):
		return maxPage
	}
	return firstPage(rs.segments[i].number)
}

// trim drops segments whose pages all have the initial state.
func (rs *runs) trim() {
	rs.segments = slices.DeleteFunc(rs.segments, func(g segment) bool { return g.index == nil && g.uniform == "" })
	if len(rs.segments) == 0 {
		rs.segments, rs.recent, rs.moved = nil, nil, nil
		clear(rs.known[:])
	}
}

// memory returns the bytes that the states take.
func (rs *runs) memory() int64 {
	n := rs.estimate()
	for _, s := range rs.interned {
		n += int64(len(s)) + 48 // the string, its header twice, its share of the map
	}
	for enc, s := range rs.recent {
		n += int64(len(enc)) + s.memory() + 32 // their share of the map
	}
	for _, known := range rs.known {
		n += known.memory()
	}
	return n + int64(cap(rs.moved))*int64(unsafe.Sizeof(change{}))
}

// estimate returns the bytes of the segments and their tables.
func (rs *runs) estimate() int64 {
	return rs.tables + int64(cap(rs.segments))*int64(unsafe.Sizeof(segment{}))
}
