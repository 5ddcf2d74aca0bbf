package model

import (
	"fmt"
	"slices"
)

// Oracle says which values a read may return, from the order of events alone. What a device's programs stored happens
// before whatever an acquire or a CPU program does after the release returned; what CPU programs did happens before
// whatever an acquire returns afterwards. A read may return what a store left unless another store came between the two
// in that order. Nothing is known here of how that is brought about.
//
// It watches some bytes of each page, and orders events page by page, since releases and acquires have ranges.
type Oracle struct {
	layout Layout
	size   int64
	pages  []*oraclePage
	// published has, per open release, the clocks of its pages when it began.
	published map[Client]map[int]clock
}

type clock []int

func (c clock) join(d clock) {
	for i := range d {
		c[i] = max(c[i], d[i])
	}
}

type oracleStore struct {
	agent int
	at    clock
	val   byte
}

// before reports whether the store is known at clock c.
func (s *oracleStore) before(c clock) bool { return c[s.agent] >= s.at[s.agent] }

type oraclePage struct {
	// clocks has what each agent knows of; agent 0 is the CPU. released is what everyone knows who acquires.
	clocks   []clock
	released clock
	stores   map[int][]oracleStore
}

// spots are the bytes of a page that programs like to use, at edges of words and elsewhere. The Oracle watches them.
var spots = []int{0, 1, 7, 8, 9, 15, 16, 100, 1000, 1001, 2047, 2048, 4088, 4094, 4095}

// NewOracle returns the Oracle of a file of zeros.
func NewOracle(l Layout) *Oracle {
	o := &Oracle{layout: l, size: l.Size, published: make(map[Client]map[int]clock)}
	for range l.Pages {
		pg := &oraclePage{released: make(clock, l.Devices+1), stores: make(map[int][]oracleStore)}
		for range l.Devices + 1 {
			pg.clocks = append(pg.clocks, make(clock, l.Devices+1))
		}
		for _, at := range spots {
			pg.stores[at] = []oracleStore{{at: make(clock, l.Devices+1)}}
		}
		o.pages = append(o.pages, pg)
	}
	return o
}

// each calls fn for the pages that [off, off+n) touches, and the part of each.
func (o *Oracle) each(off, n int64, fn func(p int, pg *oraclePage, from, to int)) {
	for p, pg := range o.pages {
		start := int64(p) * PageSize
		from, to := max(off-start, 0), min(off+n-start, PageSize)
		if from < to {
			fn(p, pg, int(from), int(to))
		}
	}
}

// store records n bytes at off, whose values val knows. Bytes past end of file are nobody's.
func (o *Oracle) store(agent int, off, n int64, val func(i int64) byte) {
	o.each(off, min(n, o.size-off), func(p int, pg *oraclePage, from, to int) {
		c := pg.clocks[agent]
		if agent == 0 {
			c.join(pg.released)
		}
		c[agent]++
		at := slices.Clone(c)
		for _, spot := range spots {
			if from <= spot && spot < to {
				s := oracleStore{agent, at, val(int64(p)*PageSize + int64(spot) - off)}
				pg.stores[spot] = append(pg.prune(pg.stores[spot]), s)
			}
		}
	})
}

// prune drops the stores that nobody may read any more.
func (pg *oraclePage) prune(list []oracleStore) []oracleStore {
	return slices.DeleteFunc(slices.Clone(list), func(s oracleStore) bool {
		for _, c := range pg.clocks {
			if !pg.superseded(list, &s, c) {
				return false
			}
		}
		return true
	})
}

// superseded reports whether at clock c another store is known that came after s.
func (pg *oraclePage) superseded(list []oracleStore, s *oracleStore, c clock) bool {
	for i := range list {
		t := &list[i]
		if !slices.Equal(t.at, s.at) && s.before(t.at) && t.before(c) {
			return true
		}
	}
	return false
}

// Event tells the Oracle of a step that was carried out, and what it returned. It fails if no order of events allows it.
func (o *Oracle) Event(s Step, got []byte) error {
	agent := 0
	if !o.layout.IsCPU(s.Client) {
		agent = o.layout.Device(s.Client) + 1
	}
	data := func(i int64) byte {
		if s.Same {
			return s.Val
		}
		return s.Val + byte(i)
	}
	zero := func(int64) byte { return 0 }
	switch s.Op {
	case Write:
		if end := s.Off + s.Len; end > o.size {
			o.resize(end)
		}
		o.store(0, s.Off, s.Len, data)
	case MapStore:
		o.store(0, s.Off, s.Len, data)
	case Store:
		o.store(agent, s.Off, s.Len, data)
	case Truncate:
		o.resize(s.Off)
	case Punch:
		o.store(0, s.Off, s.Len, zero)
	case Read, DirectRead, Load:
		return o.check(agent, s.Off, got)
	case Acquire:
		o.acquire(agent, s)
	case Map:
		if !s.Lazy {
			o.acquire(agent, s)
		}
	case Publish:
		o.publish(agent, s)
	case Finish:
		o.finish(s.Client)
	case Release, DontNeed, Unmap, Kill:
		o.publish(agent, s)
		o.finish(s.Client)
	}
	return nil
}

// resize sets the size. What lies past either size is zero as if the CPU had written it.
func (o *Oracle) resize(size int64) {
	old := o.size
	o.size = max(old, size)
	o.store(0, min(old, size), o.size-min(old, size), func(int64) byte { return 0 })
	o.size = size
}

func (o *Oracle) acquire(agent int, s Step) {
	o.each(s.Off, s.Len, func(_ int, pg *oraclePage, _, _ int) {
		pg.clocks[agent].join(pg.released)
		pg.clocks[agent].join(pg.clocks[0])
	})
}

func (o *Oracle) publish(agent int, s Step) {
	rel := make(map[int]clock)
	o.published[s.Client] = rel
	o.each(s.Off, s.Len, func(p int, pg *oraclePage, _, _ int) { rel[p] = slices.Clone(pg.clocks[agent]) })
}

func (o *Oracle) finish(c Client) {
	for p, at := range o.published[c] {
		o.pages[p].released.join(at)
	}
	delete(o.published, c)
}

func (o *Oracle) check(agent int, off int64, got []byte) (err error) {
	o.each(off, int64(len(got)), func(p int, pg *oraclePage, from, to int) {
		if agent == 0 {
			pg.clocks[0].join(pg.released)
		}
		for _, spot := range spots {
			if spot < from || spot >= to || err != nil {
				continue
			}
			b := got[int64(p)*PageSize+int64(spot)-off]
			list := pg.stores[spot]
			if !slices.ContainsFunc(list, func(s oracleStore) bool {
				return s.val == b && !pg.superseded(list, &s, pg.clocks[agent])
			}) {
				err = fmt.Errorf("byte %d of page %d reads 0x%02x, which no order of events allows", spot, p, b)
			}
		}
	})
	return err
}
