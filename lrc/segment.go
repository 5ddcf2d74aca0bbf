package lrc

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
	// The table: state i is encoded in blob[ends[i-1]:ends[i]]; pages[i] pages have it.
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

// vacant returns the number of a state that no page has and whose encoding has n bytes. Reusing it keeps the table from
// growing when pages change again and again.
func (g *segment) vacant(n int) (uint16, bool) {
	for k, pages := range g.pages {
		if pages == 0 && len(g.encoding(uint16(k))) == n {
			return uint16(k), true
		}
	}
	return 0, false
}

// add appends a state to the table. The table grows in small steps, because a large file has many segments.
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

// compact drops the table if all pages agree again. Otherwise it drops states that no page has any more, if there are
// many.
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

// memory returns the bytes of the table.
func (g *segment) memory() int64 {
	return int64(cap(g.index))*2 + int64(cap(g.blob)) + int64(cap(g.ends))*4 + int64(cap(g.pages))*2
}
