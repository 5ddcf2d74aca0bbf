package model

import (
	"fmt"
	"maps"
	"slices"
)

// A client's view is what its View asked for. It has no other state. An acquired view shows home, after the releases of
// its pages and the kernel's dirty pages of the whole span have come home.

// ViewSegment is Count rows of Len bytes. The first is at Off of the file; each begins Stride bytes after the one
// before.
type ViewSegment struct{ Off, Len, Stride, Count int64 }

// Segments returns the segments of a View. Some overlap, and some reach past end of file.
func (s Step) Segments() []ViewSegment {
	list := []ViewSegment{{Off: s.Off, Len: s.Len, Count: 1}}
	if s.Val&1 != 0 {
		n := 1 + s.Len%90
		list = append(list, ViewSegment{Off: s.Off / 3, Len: n, Stride: n + s.Len%3*2000, Count: 1 + int64(s.Val>>3)%6})
	}
	if s.Val&2 != 0 {
		list = append(list, ViewSegment{Off: s.Off + s.Len/2, Len: s.Len, Count: 1})
	}
	if s.Val&4 != 0 {
		list = append(list, ViewSegment{Off: 3*PageSize + s.Len, Len: 2000, Count: 1})
	}
	return list
}

// Align returns the alignment of the segments of a View.
func (s Step) Align() int64 {
	if s.Val&8 != 0 {
		return 1
	}
	return 256
}

// viewByte is the origin of a byte of a view: row of segment, at offset at in the file. Padding has row -1.
type viewByte struct {
	at           int64
	segment, row int
}

// viewBytes returns the bytes of a View's view, one by one.
func (s Step) viewBytes() (list []viewByte) {
	for i, g := range s.Segments() {
		for int64(len(list))%s.Align() != 0 {
			list = append(list, viewByte{row: -1})
		}
		for row := range g.Count {
			for b := range g.Len {
				list = append(list, viewByte{g.Off + row*g.Stride + b, i, int(row)})
			}
		}
	}
	return list
}

// Part returns the n bytes at off that a Look acquires of a view of size bytes.
func (s Step) Part(size int64) (off, n int64) {
	if s.Val%3 == 0 {
		return 0, size
	}
	off = s.Off % size
	return off, min(s.Len, size-off)
}

// ViewSize returns the size of a View's view in bytes.
func (s Step) ViewSize() int64 { return int64(len(s.viewBytes())) }

// acquireView brings home what the view of v shows in the bytes part.
func (m *Model) acquireView(v Step, part []viewByte, whole bool) {
	least, most := v.viewSpan()
	m.flush(least, most-least, false)
	for _, span := range v.acquired(part, whole) {
		m.each(span[0], span[1]-span[0], func(p, _, _ int, _ int64) {
			if p < len(m.pages) {
				m.collect(p, false)
			}
		})
	}
}

// viewSpan returns the smallest offset in the view of a View, and the end of the largest.
func (s Step) viewSpan() (least, most int64) {
	for i, b := range s.viewBytes() {
		if b.row >= 0 && (i == 0 || b.at < least) {
			least = b.at
		}
		if b.row >= 0 {
			most = max(most, b.at+1)
		}
	}
	return least, most
}

// acquired returns what an acquire of the bytes part of the view of v brings up to date: each segment's bytes from its
// first to its last byte in part. For the whole view, it includes what is between segments.
func (v Step) acquired(part []viewByte, whole bool) (list [][2]int64) {
	if whole {
		least, most := v.viewSpan()
		return [][2]int64{{least, most}}
	}
	spans := make(map[int][2]int64)
	for _, b := range part {
		if b.row < 0 {
			continue
		}
		span, known := spans[b.segment]
		if !known {
			span = [2]int64{b.at, b.at}
		}
		spans[b.segment] = [2]int64{min(span[0], b.at), max(span[1], b.at+1)}
	}
	// A part with several rows has whole rows.
	for _, i := range slices.Sorted(maps.Keys(spans)) {
		list = append(list, v.wholeRows(part, i, spans[i]))
	}
	return list
}

// ReadsOf returns direct reads of what s, a View or a Look, brings up to date.
func (m *Model) ReadsOf(s Step) (reads []Step) {
	v, part, whole := s, []viewByte(nil), true
	if s.Op == Look {
		var ok bool
		if v, ok = m.views[s.Client]; !ok {
			return nil
		}
		all := v.viewBytes()
		off, n := s.Part(int64(len(all)))
		part, whole = all[off:off+n], n == int64(len(all))
	} else if s.Lazy {
		return nil
	}
	for _, span := range v.acquired(part, whole) {
		if n := min(span[1], m.size) - span[0]; n > 0 {
			reads = append(reads, Step{Op: DirectRead, Off: span[0], Len: n})
		}
	}
	return reads
}

// wholeRows returns the span of the rows of a segment that part has bytes of. If that is only one row, it returns span.
func (s Step) wholeRows(part []viewByte, segment int, span [2]int64) [2]int64 {
	first, last := -1, -1
	for _, b := range part {
		if b.row >= 0 && b.segment == segment {
			if first < 0 {
				first = b.row
			}
			last = b.row
		}
	}
	if first == last {
		return span
	}
	g := s.Segments()[segment]
	return [2]int64{g.Off + int64(first)*g.Stride, g.Off + int64(last)*g.Stride + g.Len}
}

func (m *Model) view(s Step) {
	m.views[s.Client] = s
	if !s.Lazy {
		m.acquireView(s, s.viewBytes(), true)
	}
}

func (m *Model) look(s Step) []byte {
	v := m.views[s.Client]
	all := v.viewBytes()
	off, n := s.Part(int64(len(all)))
	part := all[off : off+n]
	m.acquireView(v, part, n == int64(len(all)))
	out := make([]byte, n)
	for i, b := range part {
		if b.row >= 0 && b.at < m.size {
			out[i] = m.pages[b.at/PageSize].home[b.at%PageSize]
		}
	}
	return out
}

// Viewed returns the View of a client, if it has one.
func (m *Model) Viewed(c Client) (s Step, ok bool) {
	s, ok = m.views[c]
	return s, ok
}

// traceLook records what a client reads of a view that it has acquired.
func (o *Oracle) traceLook(s Step, got []byte) {
	if o.trace == nil {
		return
	}
	all := o.views[s.Client].viewBytes()
	off, n := s.Part(int64(len(all)))
	for i, b := range all[off : off+min(n, int64(len(got)))] {
		if b.row >= 0 && b.at < o.size() {
			o.trace.look(b.at, got[i])
		}
	}
}

// checkLook checks what a client reads of a view that it has acquired: the bytes that an acquire shows to a device
// without programs.
func (o *Oracle) checkLook(s Step, got []byte) error {
	all := o.views[s.Client].viewBytes()
	off, n := s.Part(int64(len(all)))
	if int64(len(got)) != n {
		return fmt.Errorf("%d bytes of a view were read, want %d", len(got), n)
	}
	clocks := make([]clock, len(o.pages))
	for p, pg := range o.pages {
		clocks[p] = o.clock()
		clocks[p].join(pg.released)
		clocks[p].join(pg.clocks[0])
		clocks[p].join(pg.clocks[o.source()])
	}
	for i := 0; i < len(got); {
		b := all[off+int64(i)]
		if b.row < 0 || b.at >= o.size() {
			if got[i] != 0 {
				return fmt.Errorf("byte %d of a view reads 0x%02x, but the file has no byte there", off+int64(i), got[i])
			}
			i++
			continue
		}
		p, from, to := int(b.at/PageSize), int(b.at%PageSize), int(b.at%PageSize)+1
		j := i + 1
		for ; j < len(got) && to < PageSize && all[off+int64(j)].row >= 0 && all[off+int64(j)].at == b.at+int64(j-i) &&
			b.at+int64(j-i) < o.size(); j++ {
			to++
		}
		if err := o.checkAt(p, from, to, got[i:j], clocks[p], false); err != nil {
			return fmt.Errorf("byte %d of a view: %w", off+int64(i), err)
		}
		i = j
	}
	return nil
}
