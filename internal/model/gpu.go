package model

import (
	"bytes"
	"maps"
)

// within returns the pages of s that its client maps.
func (m *Model) within(s Step) (start, end int) {
	mp := m.mappings[s.Client]
	if mp == nil {
		return 0, 0
	}
	start = max(int(s.Off/PageSize), mp.start)
	end = min(int((s.Off+s.Len+PageSize-1)/PageSize), mp.end)
	return start, max(start, end)
}

func (m *Model) owner(c Client) owner { return owner(m.layout.Device(c) + 1) }

// mapped reports whether a client other than except maps page p on o. With writable, only mappings for writing count.
func (m *Model) mapped(o owner, p int, writable bool, except Client) bool {
	for c, mp := range m.mappings {
		if c != except && m.owner(c) == o && mp.start <= p && p < mp.end && (mp.writable || !writable) {
			return true
		}
	}
	return false
}

const nobody Client = -1

func (m *Model) mapRange(s Step) {
	m.mappings[s.Client] = &mapping{
		start:    int(s.Off / PageSize),
		end:      min(int((s.Off+s.Len+PageSize-1)/PageSize), m.layout.Pages),
		writable: s.Writable,
		movable:  s.Movable,
		fetched:  make(map[int]bool),
	}
	if s.Movable {
		return // it has no memory yet
	}
	if !s.Lazy {
		start, end := m.within(s)
		m.acquire(s.Client, start, end)
	}
	m.expose(s.Client)
}

// expose prepares everything that the client's device has of the file, because the client can look at all of it. Stale
// bytes are removed, or made current if another client maps the page. Pages that the client may store into are tracked.
func (m *Model) expose(c Client) {
	o := m.owner(c)
	for p, pg := range m.pages {
		if pg.replicas[o] != nil && pg.pendingBut(o) {
			m.collect(p, false) // other owners' releases show which bytes are stale
		}
		if r := pg.replicas[o]; r != nil && r.stale(pg.homeV) && !r.hollow {
			if r.tracked || m.mapped(o, p, false, c) {
				m.refresh(o, p)
			} else {
				m.remove(p, o)
			}
		}
		if mp := m.mappings[c]; mp.writable && mp.start <= p && p < mp.end {
			m.track(o, p)
		}
	}
}

// track makes sure that stores into page p of o are found, even if home's bytes were never copied there.
func (m *Model) track(o owner, p int) {
	pg := m.pages[p]
	r := pg.replicas[o]
	switch {
	case r == nil:
		v := vector{}
		v[o] = pg.released[o]
		pg.replicas[o] = &replica{data: make([]byte, PageSize), base: make([]byte, PageSize), v: v, tracked: true,
			unfilled: true, hollow: true}
	case !r.tracked:
		r.tracked = true
		copy(r.base, pg.home)
	}
}

func (r *replica) join(home vector) {
	for w, n := range home {
		r.v[w] = max(r.v[w], n)
	}
	r.unfilled, r.hollow = false, false
}

// acquire brings the pages [start, end) up to date on the client's device (rule 5).
func (m *Model) acquire(c Client, start, end int) {
	o := m.owner(c)
	m.flush(int64(start)*PageSize, int64(end-start)*PageSize, false)
	for p := start; p < end; p++ {
		m.mappings[c].fetched[p] = true
		m.refresh(o, p)
	}
}

// refresh brings page p of o up to date.
func (m *Model) refresh(o owner, p int) {
	pg := m.pages[p]
	m.collect(p, false)
	r := pg.replicas[o]
	switch {
	case r == nil:
		r = &replica{data: append([]byte{}, pg.home...), base: append([]byte{}, pg.home...), v: maps.Clone(pg.homeV)}
		pg.replicas[o] = r
	case r.stale(pg.homeV):
		for i := range r.data {
			if !r.tracked || (pg.home[i] != r.base[i] && r.data[i] == r.base[i]) {
				r.data[i] = pg.home[i]
			}
		}
		copy(r.base, pg.home)
		r.join(pg.homeV)
	}
	if !r.tracked && m.mapped(o, p, true, nobody) {
		r.tracked = true
		copy(r.base, pg.home)
	}
}

// modified reports whether programs changed page p of o since it last agreed with home.
func (m *Model) modified(p int, o owner) bool {
	r := m.pages[p].replicas[o]
	if r == nil || !r.tracked {
		return false
	}
	n := m.valid(p)
	return string(r.data[:n]) != string(r.base[:n])
}

// publish is the first part of a release (rule 2), up to the moment at which the kernel is told to drop the pages.
func (m *Model) publish(c Client, start, end int) {
	o := m.owner(c)
	rel := &release{drain: make(map[int]bool)}
	m.releases[c] = rel
	for p := start; p < end; p++ {
		rel.pages = append(rel.pages, p)
		if !m.modified(p, o) {
			continue
		}
		if m.layout.WriteBack {
			// The kernel may hold a whole page that a program wrote after it saw an earlier release. It may write that
			// page home while the page drains.
			m.collect(p, false)
		}
		pg := m.pages[p]
		pg.replicas[o].v[o]++
		pg.released[o] = pg.replicas[o].v[o]
		if pg.mayHold || m.layout.WriteBack {
			rel.drain[p] = true
		}
		pg.mayHold = false
	}
}

// finish makes the kernel drop the pages that it may hold of the client's release. It does the same for other releases
// of the same pages, which may have published what the client's device stored.
func (m *Model) finish(c Client) {
	rel := m.releases[c]
	m.drain(rel)
	for other := range m.layout.Clients() {
		if r := m.releases[Client(other)]; r != nil && r.overlaps(rel) {
			m.drain(r)
		}
	}
	delete(m.releases, c)
}

// overlaps reports whether r still drains a page of other.
func (r *release) overlaps(other *release) bool {
	for _, p := range other.pages {
		if r.drain[p] {
			return true
		}
	}
	return false
}

// drain makes the kernel drop the pages of a release until it holds no page without the released bytes.
func (m *Model) drain(rel *release) {
	for len(rel.drain) > 0 {
		for _, p := range rel.pages {
			if rel.drain[p] {
				m.drop(p)
			}
		}
		clear(rel.drain)
		for _, p := range rel.pages {
			if pg := m.pages[p]; pg.mayHold && pg.anyPending() && !m.draining(p) {
				pg.mayHold = false
				rel.drain[p] = true
			}
		}
	}
}

func (m *Model) store(s Step) {
	data := s.Bytes()
	m.each(s.Off, s.Len, func(p, from, to int, at int64) {
		copy(m.pages[p].replicas[m.owner(s.Client)].data[from:to], data[at:])
	})
}

// group begins a group, stores into it and releases it. Earlier releases of its pages by the device come home first.
func (m *Model) group(s Step) {
	start, end := m.within(s)
	for p := start; p < end; p++ {
		if m.pages[p].pending(m.owner(s.Client)) {
			m.collect(p, false)
		}
	}
	m.store(s)
	m.publish(s.Client, start, end)
	m.finish(s.Client)
}

func (m *Model) load(s Step) (out []byte) {
	m.each(s.Off, min(s.Len, m.size-s.Off), func(p, from, to int, _ int64) {
		out = append(out, m.pages[p].replicas[m.owner(s.Client)].data[from:to]...)
	})
	return out
}

func (m *Model) dontNeed(s Step) {
	start, end := m.within(s)
	if m.mappings[s.Client].writable {
		m.publish(s.Client, start, end)
		m.finish(s.Client)
	}
	o := m.owner(s.Client)
	for p := start; p < end; p++ {
		if !m.mapped(o, p, false, s.Client) && !m.draining(p) {
			m.collect(p, false)
			if !m.modified(p, o) {
				m.remove(p, o)
				m.mappings[s.Client].fetched[p] = false
				if m.mappings[s.Client].writable {
					m.track(o, p)
				}
			}
		}
	}
}

func (m *Model) evict(s Step) {
	o := m.owner(s.Client)
	for p := range m.pages {
		if s.touches(p) && m.pages[p].replicas[o] != nil && !m.mapped(o, p, false, nobody) && !m.draining(p) {
			m.collect(p, false)
			m.remove(p, o)
		}
	}
}

func (m *Model) remove(p int, o owner) {
	pg := m.pages[p]
	delete(pg.replicas, o)
	if len(pg.replicas) == 0 {
		pg.mayHold = true
	}
}

func (m *Model) untrack() {
	for p, pg := range m.pages {
		for o, r := range pg.replicas {
			if r.tracked && !pg.pending(o) && !m.mapped(o, p, true, nobody) {
				if r.tracked = false; r.hollow {
					m.remove(p, o)
				}
			}
		}
	}
}

// reachable reports whether the client of s has acquired every page that s touches since it mapped the page, and still
// has it. In a mapping that does not move, the client may also store into other pages, but not zeros, which would not
// be found.
func (m *Model) reachable(s Step) bool {
	mp := m.mappings[s.Client]
	for p := int(s.Off / PageSize); int64(p)*PageSize < s.Off+s.Len; p++ {
		switch {
		case p < mp.start || p >= mp.end, m.pages[p].replicas[m.owner(s.Client)] == nil, s.Op == Load && !mp.fetched[p]:
			return false
		case !mp.fetched[p] && (mp.movable || bytes.IndexByte(s.Bytes(), 0) >= 0):
			return false
		}
	}
	return s.Op != Load || s.Off < m.size
}

// Mapped reports whether a GPU client maps pages now.
func (m *Model) Mapped(c Client) bool { return m.mappings[c] != nil }

// Movable reports whether a GPU client has a movable mapping now.
func (m *Model) Movable(c Client) bool { return m.Mapped(c) && m.mappings[c].movable }
