package model

import (
	"bytes"
	"fmt"
	"maps"
)

// owner is 0 for the CPU. For a device it is the device's number plus one.
type owner int

const cpu owner = 0

// vector counts releases by owner.
type vector map[owner]int

func (v vector) behind(w vector) bool {
	for o, n := range w {
		if v[o] < n {
			return true
		}
	}
	return false
}

// replica is one page on one device.
type replica struct {
	data, base []byte
	v          vector
	// tracked says that programs may store into it.
	tracked bool
	// unfilled says that home's bytes were never copied here. hollow says that, besides, nothing that programs stored
	// here came home: the base is zeros.
	unfilled, hollow bool
}

// stale reports whether r lacks a release that home has.
func (r *replica) stale(home vector) bool { return r.unfilled || r.v.behind(home) }

// kernelPage is one page in the kernel's page cache.
type kernelPage struct {
	data    []byte
	present bool
	dirty   bool
}

// pageState is one page of the file with all its copies.
type pageState struct {
	home     []byte
	released vector // by every owner
	homeV    vector // the part of released that home has
	// mayHold says that the daemon must assume that the kernel holds the page.
	mayHold  bool
	kernel   kernelPage
	replicas map[owner]*replica
}

// mapping is a GPU client's mapping.
type mapping struct {
	start, end int // pages
	// movable says that it has memory in brackets only. That changes no byte.
	writable, movable bool
	// fetched are the pages that the client has acquired: all pages, unless the mapping is lazy.
	fetched map[int]bool
}

// release is a release that was published and has not returned yet.
type release struct {
	// pages are the pages of the release, drain those that the kernel may still hold.
	pages []int
	drain map[int]bool
}

// Model is the reference. Use New to make one.
type Model struct {
	layout   Layout
	size     int64
	pages    []*pageState
	mappings map[Client]*mapping
	releases map[Client]*release
	views    map[Client]Step // the View of each client
	// Overlaps counts the bytes to which two owners gave different values.
	Overlaps int64
}

// New returns a Model of a file of zeros that no device holds.
func New(l Layout) *Model {
	m := &Model{layout: l, size: l.Size, mappings: make(map[Client]*mapping), releases: make(map[Client]*release),
		views: make(map[Client]Step)}
	for range l.Pages {
		m.pages = append(m.pages, &pageState{
			home:     make([]byte, PageSize),
			released: vector{},
			homeV:    vector{},
			mayHold:  true,
			kernel:   kernelPage{data: make([]byte, PageSize)},
			replicas: make(map[owner]*replica),
		})
	}
	return m
}

// Size returns the file's size.
func (m *Model) Size() int64 { return m.size }

// Home returns the file's bytes as home has them.
func (m *Model) Home() []byte {
	var b []byte
	for _, pg := range m.pages {
		b = append(b, pg.home...)
	}
	return b[:m.size]
}

// copyDirty copies the bytes of the kernel's dirty pages from src to dst, which are copies of the file.
func (m *Model) copyDirty(dst, src []byte) {
	for p, pg := range m.pages {
		if n := m.valid(p); pg.kernel.dirty {
			at := p * PageSize
			copy(dst[at:at+n], src[at:at+n])
		}
	}
}

// Kernel returns the kernel's copy of page p up to end of file, or nil if there is none.
func (m *Model) Kernel(p int) []byte {
	if k := m.pages[p].kernel; k.present {
		return k.data[:m.valid(p)]
	}
	return nil
}

// Replica returns device d's copy of page p up to end of file, or nil if there is none.
func (m *Model) Replica(d, p int) []byte {
	if r := m.pages[p].replicas[owner(d+1)]; r != nil {
		return r.data[:m.valid(p)]
	}
	return nil
}

// valid returns the number of bytes of page p before end of file.
func (m *Model) valid(p int) int { return int(min(max(m.size-int64(p)*PageSize, 0), PageSize)) }

// owners returns the owners with replicas of pg, ascending.
func (pg *pageState) owners() (list []owner) {
	for o := owner(0); len(list) < len(pg.replicas); o++ {
		if pg.replicas[o] != nil {
			list = append(list, o)
		}
	}
	return list
}

func (pg *pageState) pending(o owner) bool { return pg.replicas[o].v[o] > pg.homeV[o] }

// pendingBut reports whether a release of an owner other than o is pending.
func (pg *pageState) pendingBut(o owner) bool {
	for x := range pg.replicas {
		if x != o && pg.pending(x) {
			return true
		}
	}
	return false
}

func (pg *pageState) anyPending() bool {
	for _, o := range pg.owners() {
		if pg.pending(o) {
			return true
		}
	}
	return false
}

func (m *Model) draining(p int) bool {
	for _, r := range m.releases {
		if r.drain[p] {
			return true
		}
	}
	return false
}

// collect brings home what devices released of page p (rule 3). entering says that the kernel asks for the page.
func (m *Model) collect(p int, entering bool) {
	if m.draining(p) && !entering {
		return
	}
	pg := m.pages[p]
	for _, o := range pg.owners() {
		if !pg.pending(o) {
			continue
		}
		r := pg.replicas[o]
		for i := range m.valid(p) {
			if r.data[i] == r.base[i] {
				continue
			}
			if pg.home[i] != r.base[i] && pg.home[i] != r.data[i] && !r.hollow {
				m.Overlaps++
			}
			pg.home[i] = r.data[i]
		}
		copy(r.base, r.data)
		r.hollow = false
		pg.homeV[o] = r.v[o]
		if n := m.valid(p); bytes.Equal(pg.home[:n], r.data[:n]) {
			r.join(pg.homeV)
		}
	}
}

// writeHome carries out a write request that reaches home (rules 4 and 6).
func (m *Model) writeHome(off int64, data []byte) {
	end := off + int64(len(data))
	for p := off / PageSize; p*PageSize < end; p++ {
		m.collect(int(p), false)
	}
	if end > m.size {
		m.moveEnd(m.size)
		m.grow(end)
	}
	m.each(off, int64(len(data)), func(p, from, to int, at int64) {
		pg := m.pages[p]
		copy(pg.home[from:to], data[at:])
		pg.released[cpu]++
		pg.homeV[cpu] = pg.released[cpu]
	})
}

// each calls fn for the part [from, to) of each page that [off, off+n) touches; at is its distance from off.
func (m *Model) each(off, n int64, fn func(p, from, to int, at int64)) {
	for at := int64(0); at < n; {
		p := (off + at) / PageSize
		from := (off + at) % PageSize
		to := min(PageSize, from+n-at)
		fn(int(p), int(from), int(to), at)
		at += to - from
	}
}

// moveEnd is called before the end of the file moves from or to an offset inside a page. The page's replicas become
// zero from there on. If one of them agrees with home, home gets a new version.
func (m *Model) moveEnd(end int64) {
	if end%PageSize == 0 {
		return
	}
	pg := m.pages[end/PageSize]
	for _, r := range pg.replicas {
		if r.tracked && !r.stale(pg.homeV) {
			pg.released[cpu]++
			pg.homeV[cpu] = pg.released[cpu]
			return
		}
	}
}

// grow makes the file longer. What devices' programs stored past the former end is lost.
func (m *Model) grow(size int64) {
	m.each(m.size, size-m.size, func(p, from, to int, _ int64) {
		for _, r := range m.pages[p].replicas {
			clear(r.data[from:to])
			clear(r.base[from:to])
		}
	})
	m.size = size
}

// shrink makes the file shorter, everywhere at once.
func (m *Model) shrink(size int64) {
	m.each(size, int64(m.layout.Pages)*PageSize-size, func(p, from, to int, _ int64) {
		pg := m.pages[p]
		clear(pg.home[from:to])
		clear(pg.kernel.data[from:to])
		for _, r := range pg.replicas {
			clear(r.data[from:to])
			clear(r.base[from:to])
		}
		if from > 0 {
			return
		}
		pg.kernel.present, pg.kernel.dirty = false, false
		for _, r := range pg.replicas {
			r.v, r.unfilled, r.hollow = maps.Clone(pg.released), false, false
		}
		pg.homeV = maps.Clone(pg.released)
	})
	m.size = size
}

// Do carries out a step that is Legal. It returns the bytes that a read or a load sees.
func (m *Model) Do(s Step) []byte {
	switch s.Op {
	case Write:
		m.write(s)
	case MapStore:
		m.mapStore(s)
	case Read:
		return m.read(s)
	case DirectRead:
		return m.directRead(s)
	case Fsync:
		m.flush(0, m.size, false)
		m.collectAll()
	case Truncate:
		m.resize(s.Off)
	case Punch:
		m.zero(s.Off, s.Len, true)
	case Append:
		s.Off = m.size
		m.write(s)
	case DirectWrite:
		m.directWrite(s)
	case OpenTrunc:
		m.resize(0)
	case Allocate:
		m.allocate(s)
	case Zero:
		m.zero(s.Off, s.Len, s.Keep)
	case PunchRest:
		m.zero(s.Off, m.size-s.Off, true)
	case SeekRead:
		return m.seekRead(s)
	case Copy:
		m.copyRange(s)
	case CopyOut:
		return m.copyOut(s)
	case Flush:
		m.flush(s.Off, s.Len, false)
	case Reclaim:
		m.reclaim(s)
	case Map:
		m.mapRange(s)
	case Unmap, Kill:
		mp := m.mappings[s.Client]
		if mp.writable {
			m.publish(s.Client, mp.start, mp.end)
			m.finish(s.Client)
		}
		delete(m.mappings, s.Client)
		if s.Op == Kill {
			delete(m.views, s.Client)
		}
	case Store:
		m.store(s)
	case Group:
		m.group(s)
	case Load:
		return m.load(s)
	case Acquire, Use:
		start, end := m.within(s)
		m.acquire(s.Client, start, end)
	case Release:
		start, end := m.within(s)
		m.publish(s.Client, start, end)
		m.finish(s.Client)
	case Publish:
		start, end := m.within(s)
		m.publish(s.Client, start, end)
	case Drop:
		for p := range m.releases[s.Client].drain {
			if s.touches(p) {
				m.drop(p)
			}
		}
	case Finish:
		m.finish(s.Client)
	case DontNeed:
		m.dontNeed(s)
	case Evict:
		m.evict(s)
	case Collect:
		m.collectAll()
	case Untrack:
		m.untrack()
	case View:
		m.view(s)
	case Look:
		return m.look(s)
	case Unview:
		delete(m.views, s.Client)
	default:
		if s.Op.InSource() {
			m.source(s)
		}
	}
	return nil
}

// touches reports whether the range of s includes a byte of page p.
func (s Step) touches(p int) bool {
	return s.Off < int64(p+1)*PageSize && int64(p)*PageSize < s.Off+s.Len
}

func (m *Model) collectAll() {
	for p := range m.pages {
		m.collect(p, false)
	}
}

// Verify returns an error if the model's state violates its own rules.
func (m *Model) Verify() error {
	for p, pg := range m.pages {
		n := m.valid(p)
		for o, r := range pg.replicas {
			if pg.released.behind(r.v) || pg.released.behind(pg.homeV) {
				return fmt.Errorf("page %d: a vector is ahead of what was released", p)
			}
			if r.stale(pg.homeV) {
				continue
			}
			if r.tracked && !bytes.Equal(r.base[:n], pg.home[:n]) {
				return fmt.Errorf("page %d, device %d: up to date, but its base is not home", p, o-1)
			}
			if !r.tracked && !bytes.Equal(r.data[:n], pg.home[:n]) {
				return fmt.Errorf("page %d, device %d: up to date and not tracked, but not home", p, o-1)
			}
		}
		if k := pg.kernel; k.present && !k.dirty && !m.draining(p) {
			if !bytes.Equal(k.data[:n], pg.home[:n]) {
				return fmt.Errorf("page %d: the kernel has other bytes than home", p)
			}
			if pg.anyPending() {
				return fmt.Errorf("page %d: the kernel has it, without what was released", p)
			}
		}
	}
	return nil
}
