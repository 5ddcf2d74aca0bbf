package model

// fault makes the kernel read page p if it does not hold the page. Released bytes come home even if the page drains,
// because the kernel asks for it.
func (m *Model) fault(p int) {
	pg := m.pages[p]
	if pg.kernel.present {
		return
	}
	pg.mayHold = true
	pending := pg.anyPending()
	m.collect(p, true)
	m.readAhead(p, pending)
	copy(pg.kernel.data, pg.home)
	pg.kernel.present = true
}

// readAhead collects what a read of page p also brings home: if the page was pending, all pages after it.
func (m *Model) readAhead(p int, pending bool) {
	if m.layout.ReadAhead && pending {
		for q := p + 1; q < len(m.pages) && m.valid(q) > 0; q++ {
			m.collect(q, false)
		}
	}
}

func (m *Model) write(s Step) {
	data := s.Bytes()
	grows := s.Off+s.Len > m.size
	if !m.layout.WriteBack {
		m.writeHome(s.Off, data)
	} else {
		// The kernel reads a page before a partial write to it, unless the page is past end of file.
		m.each(s.Off, s.Len, func(p, from, to int, _ int64) {
			if to-from < PageSize && m.valid(p) > 0 {
				m.fault(p)
			}
		})
	}
	m.each(s.Off, s.Len, func(p, from, to int, at int64) {
		pg := m.pages[p]
		k := &pg.kernel
		whole := to-from == PageSize
		if k.present || whole || m.layout.WriteBack {
			if !k.present {
				clear(k.data)
			}
			copy(k.data[from:to], data[at:])
			k.present = true
		}
		if m.layout.WriteBack {
			k.dirty = true
		} else if whole {
			pg.mayHold = true
		}
	})
	if m.layout.WriteBack && grows {
		m.grow(s.Off + s.Len)
		m.flush(s.Off, s.Len, false)
	}
}

// flushed notes that page p was written back. With write-back caching, the kernel may hold a page that it never read.
func (m *Model) flushed(p int) {
	if m.layout.WriteBack {
		m.pages[p].mayHold = true
	}
}

func (m *Model) mapStore(s Step) {
	data := s.Bytes()
	m.each(s.Off, s.Len, func(p, from, to int, at int64) {
		m.fault(p)
		k := &m.pages[p].kernel
		copy(k.data[from:to], data[at:])
		k.dirty = true
	})
}

func (m *Model) read(s Step) (out []byte) {
	n := min(s.Len, m.size-s.Off)
	m.each(s.Off, n, func(p, from, to int, _ int64) {
		m.fault(p)
		out = append(out, m.pages[p].kernel.data[from:to]...)
	})
	return out
}

func (m *Model) directRead(s Step) (out []byte) {
	n := min(s.Len, m.size-s.Off)
	m.flush(s.Off, n, false)
	m.each(s.Off, n, func(p, from, to int, _ int64) {
		pending := m.pages[p].anyPending() && !m.draining(p)
		m.collect(p, false)
		m.readAhead(p, pending)
		out = append(out, m.pages[p].home[from:to]...)
	})
	return out
}

// flush writes the kernel's dirty pages of [off, off+n) home, as whole pages with their old bytes. With drop, the
// kernel also drops the pages.
func (m *Model) flush(off, n int64, drop bool) {
	m.each(off, min(n, m.size-off), func(p, _, _ int, _ int64) {
		k := &m.pages[p].kernel
		if k.dirty {
			k.dirty = false
			m.writeHome(int64(p)*PageSize, k.data[:m.valid(p)])
			m.flushed(p)
		}
		if drop {
			k.present = false
		}
	})
}

// drop makes the kernel write page p home if it is dirty, and drop it.
func (m *Model) drop(p int) { m.flush(int64(p)*PageSize, PageSize, true) }

func (m *Model) reclaim(s Step) {
	m.each(s.Off, s.Len, func(p, _, _ int, _ int64) {
		if k := &m.pages[p].kernel; !k.dirty {
			k.present = false
		}
	})
}
