package model

import "slices"

// CPU programs learn of a change made directly in SOURCE at the next open at the latest, and devices at the next
// acquire. Until then, they may or may not see it. A release does not tell CPU programs what the device knows of
// SOURCE.
//
// If the mount has bytes of a page that are not home yet, the whole page may go home, over newer bytes in SOURCE. So a
// store in SOURCE is called soft, and may be lost, in two cases: a program on the mount had stored into the page and
// not synced it, or does so later without knowing of the store in SOURCE. The program then counts as having stored the
// whole page. A store in SOURCE that made the file longer is called firm, and must not be lost: the mount has no bytes
// for that place. A write through the mount that goes home at once changes its own bytes only.

// changeSource tells the Oracle of a step in SOURCE. got is the file's bytes from Off on after the step, or all of them
// after a SourceClone. These steps move bytes that the Oracle cannot predict.
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

// countAsStored records that a device, or the kernel, stores its copy of a page, which may be newer than what it
// acquired.
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

// touch notes that an agent's copies of pages differ from home. So they may go home over changes that the agent does
// not know.
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

// notice records that CPU programs now know the state of SOURCE.
func (o *Oracle) notice() {
	for _, pg := range o.pages {
		pg.clocks[0].join(pg.clocks[o.source()])
	}
	o.sizes = o.sizes[len(o.sizes)-1:]
}
