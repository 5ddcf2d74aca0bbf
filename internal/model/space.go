package model

// directWrite writes past the kernel's page cache. The kernel drops the range.
func (m *Model) directWrite(s Step) {
	m.forget(s.Off, s.Len)
	m.writeHome(s.Off, s.Bytes())
	m.heldWhole(s.Off, s.Len)
}

// forget makes the kernel write the pages of [off, off+n) home and drop them.
func (m *Model) forget(off, n int64) {
	m.each(off, n, func(p, _, _ int, _ int64) {
		m.drop(p)
		m.pages[p].kernel.present = false // also past end of file
	})
}

// heldWhole notes that the daemon must assume that the kernel holds the pages that were written whole.
func (m *Model) heldWhole(off, n int64) {
	m.each(off, n, func(p, from, to int, _ int64) {
		if to-from == PageSize {
			m.pages[p].mayHold = true
		}
	})
}

// allocate changes no byte, but may change the size.
func (m *Model) allocate(s Step) {
	m.each(s.Off, s.Len, func(p, _, _ int, _ int64) { m.collect(p, false) })
	if end := s.Off + s.Len; end > m.size && !s.Keep {
		m.moveEnd(m.size)
		m.grow(end)
	}
}

// zero zeroes [off, off+n), with keep only up to end of file.
func (m *Model) zero(off, n int64, keep bool) {
	if keep {
		n = min(n, m.size-off)
	}
	if n <= 0 {
		return
	}
	m.flush(off, n, false)
	m.writeHome(off, make([]byte, n))
	m.each(off, n, func(p, from, to int, _ int64) {
		k := &m.pages[p].kernel
		clear(k.data[from:to])
		if to-from == PageSize {
			k.present = false
		}
	})
}

// seekRead makes the daemon bring home everything from an offset on. Otherwise nobody knows where data begins and ends.
func (m *Model) seekRead(s Step) []byte {
	m.flush(s.Off, m.size-s.Off, false)
	for p := int(s.Off / PageSize); p < len(m.pages); p++ {
		m.collect(p, false)
	}
	return m.homeBytes(s.Off, s.Len)
}

func (m *Model) homeBytes(off, n int64) (out []byte) {
	m.each(off, min(n, m.size-off), func(p, from, to int, _ int64) {
		out = append(out, m.pages[p].home[from:to]...)
	})
	return out
}

// copyRange makes the kernel write both ranges home and drop the pages of the destination.
func (m *Model) copyRange(s Step) {
	m.flush(s.From, s.Len, false)
	m.forget(s.Off, s.Len)
	m.each(s.From, s.Len, func(p, _, _ int, _ int64) { m.collect(p, false) })
	m.writeHome(s.Off, m.homeBytes(s.From, s.Len))
	m.heldWhole(s.Off, s.Len)
}

// copyOut reads home.
func (m *Model) copyOut(s Step) []byte {
	n := min(s.Len, m.size-s.Off)
	m.flush(s.Off, n, false)
	m.each(s.Off, n, func(p, _, _ int, _ int64) { m.collect(p, false) })
	return m.homeBytes(s.Off, n)
}

// source carries out a change in SOURCE. When it is noticed is unknown, so afterwards the Model only models some file
// of that size.
func (m *Model) source(s Step) {
	m.flush(0, m.size, true)
	switch s.Op {
	case SourceWrite, SourceClone:
		m.writeHome(s.Off, s.Bytes())
	case SourceAppend:
		m.writeHome(m.size, s.Bytes())
	case SourcePunch:
		m.writeHome(s.Off, make([]byte, s.Len))
	case SourceTruncate:
		m.resize(s.Off)
	case SourceCollapse:
		m.writeHome(s.Off, m.homeBytes(s.Off+s.Len, m.size))
		m.resize(m.size - s.Len)
	case SourceInsert:
		after := m.homeBytes(s.Off, m.size)
		m.writeHome(s.Off+s.Len, after)
		m.writeHome(s.Off, make([]byte, s.Len))
	}
}

func (m *Model) resize(size int64) {
	switch {
	case size < m.size:
		m.moveEnd(size)
		m.shrink(size)
	case size > m.size:
		m.moveEnd(m.size)
		m.grow(size)
	}
}
