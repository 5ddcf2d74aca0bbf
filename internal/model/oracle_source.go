package model

import "slices"

// What somebody does in SOURCE directly, beside the mount, is known to programs on the CPU from the next open on, and
// to devices from the next acquire on. Until then they may see it or not. A release does not tell programs on the CPU
// of what the device knows of SOURCE.
//
// A page of which the mount has bytes that are not home yet may go home as a whole, whatever SOURCE has by then. So a
// store in SOURCE may be lost, and is called soft, if somebody had stored into the page on the mount and not synced it,
// or does so without knowing of the store. All of the page counts as stored by it at that time. A store in SOURCE is
// firm, and may not be lost, where it made the file longer: the mount has nothing to put there. A write through the
// mount that goes home at once changes the bytes that it has, and no others.

// changeSource tells the Oracle of a step in SOURCE. got is what the file has from Off on afterwards, or as a whole
// after a SourceClone, since these steps move bytes that the Oracle need not know.
func (o *Oracle) changeSource(s Step, got []byte) {
	old := o.size()
	switch s.Op {
	case SourceWrite:
		o.sourceStore(s.Off, s.Len, false, valuesOf(s, s.Off))
	case SourcePunch:
		o.sourceStore(s.Off, s.Len, false, zeros)
	case SourceAppend:
		o.sizes = append(o.sizes, old+s.Len)
		o.sourceStore(old, s.Len, true, valuesOf(s, old))
	case SourceTruncate:
		o.junk = o.junk || s.Off < old
		o.sizes = append(o.sizes, max(old, s.Off))
		o.sourceStore(min(old, s.Off), max(old, s.Off)-min(old, s.Off), false, zeros)
		o.sizes[len(o.sizes)-1] = s.Off
	case SourceClone:
		o.sourceStore(0, old, false, values{data: got})
	case SourceCollapse, SourceInsert:
		o.junk = true
		size := s.Off + int64(len(got))
		o.sizes = append(o.sizes, max(old, size))
		o.sourceStore(s.Off, size-s.Off, false, values{offset: s.Off, data: got})
		o.sourceStore(size, old-size, false, zeros)
		o.sizes[len(o.sizes)-1] = size
	}
}

func (o *Oracle) sourceStore(off, n int64, firm bool, v values) {
	o.each(off, n, func(_ int, pg *oraclePage, from, to int) {
		c := pg.clocks[o.source()]
		c.join(pg.clocks[0])
		c.join(pg.released)
		c[o.source()]++
		s := &oracleStore{agent: o.source(), at: slices.Clone(c), vals: []values{v}, firm: firm}
		for agent := range pg.touched {
			if s.soft = !firm; s.soft {
				pg.countAsStored(agent)
			}
		}
		pg.add(from, to, s)
	})
}

// countAsStored has a device, or the kernel, store what it has of a page, which may be newer than what it acquired.
func (pg *oraclePage) countAsStored(agent int) {
	c := pg.clocks[agent]
	before := slices.Clone(c)
	c[agent]++
	for i, seg := range pg.segments {
		s := &oracleStore{agent: agent, at: slices.Clone(c)}
		for _, t := range current(seg.stores, before) {
			s.vals = appendValues(s.vals, t.vals)
		}
		pg.segments[i].stores = append(slices.Clone(seg.stores), s)
	}
}

// touch notes that an agent's copies of pages are no longer home's, so that they may go home over what it does not know
// of.
func (o *Oracle) touch(agent int, off, n int64) {
	o.each(off, n, func(_ int, pg *oraclePage, _, _ int) {
		pg.touched[agent] = true
		unaware := false
		for _, seg := range pg.segments {
			for _, s := range seg.stores {
				if s.agent == o.source() && !s.firm && !s.before(pg.clocks[agent]) {
					s.soft, unaware = true, true
				}
			}
		}
		if unaware {
			pg.countAsStored(agent)
		}
	})
}

// notice has programs on the CPU know what SOURCE has.
func (o *Oracle) notice() {
	for _, pg := range o.pages {
		pg.clocks[0].join(pg.clocks[o.source()])
	}
	o.sizes = o.sizes[len(o.sizes)-1:]
}
