package model

import (
	"fmt"
	"slices"
)

// Oracle says which values a read may return, from the order of events alone. A device's stores happen before
// everything that an acquire or a CPU program does after their release has returned. CPU programs' stores happen before
// everything that a later acquire returns. A read may return the value of a store, unless another store came between
// the two in that order. The Oracle does not know how a system achieves that.
//
// It watches every byte. It orders events page by page, because releases and acquires have ranges.
//
// Agents are the CPU, which is 0, the devices, and the one that changes SOURCE, see oracle_source.go.
type Oracle struct {
	layout Layout
	// sizes are the sizes that CPU programs may see. The last is the real one. The others are from before changes in
	// SOURCE that need not have been noticed yet.
	sizes []int64
	pages []*oraclePage
	// published has, for each open release, the clocks of its pages when it began.
	published map[Client]map[int]clock
	views     map[Client]Step // the last View of each client
	// junk says that bytes past end of file may have any value: a device's program stored there, or SOURCE was cut.
	junk  bool
	times oracleTimes
	// trace records events if it is not nil.
	trace *Trace
}

type clock []int

func (c clock) join(d clock) {
	for i := range d {
		c[i] = max(c[i], d[i])
	}
}

// oracleStore is a store into a page.
type oracleStore struct {
	agent int
	at    clock
	// vals are the possible values of each byte. A copy of bytes that several stores raced for has several.
	vals []values
	// soft is set on a store in SOURCE that the mount may overwrite, because it was using the page at that time.
	soft bool
	// firm is set on bytes that SOURCE added to the end of the file: the mount cannot have had other bytes there.
	firm bool
}

// before reports whether the store is known at clock c.
func (s *oracleStore) before(c clock) bool { return c[s.agent] >= s.at[s.agent] }

// values are the bytes of a store: byte i after offset is first+i, or first if same is set, or data[i].
type values struct {
	offset int64
	first  byte
	same   bool
	data   []byte
}

func (v *values) at(off int64) byte {
	switch {
	case v.data != nil:
		return v.data[off-v.offset]
	case v.same:
		return v.first
	}
	return v.first + byte(off-v.offset)
}

// is reports whether v and w are the same bytes for the same reason.
func (v *values) is(w values) bool {
	switch {
	case v.same || w.same:
		return v.same && w.same && v.first == w.first && v.data == nil && w.data == nil
	case v.data != nil || w.data != nil:
		return v.data != nil && w.data != nil && v.offset == w.offset && &v.data[0] == &w.data[0]
	}
	return v.first-byte(v.offset) == w.first-byte(w.offset)
}

// appendValues appends the elements of more that are not in list.
func appendValues(list, more []values) []values {
	for _, v := range more {
		if !slices.ContainsFunc(list, v.is) {
			list = append(list, v)
		}
	}
	return list
}

var zeros = values{same: true}

// valuesOf returns what a step stores at off.
func valuesOf(s Step, off int64) values { return values{offset: off, first: s.Val, same: s.Same} }

// segment is a part of a page with the same stores. It extends to the next segment.
type segment struct {
	from   int
	stores []*oracleStore
}

type oraclePage struct {
	// clocks has what each agent knows. released is what an agent learns when it acquires.
	clocks   []clock
	released clock
	segments []segment
	// touched has the agents whose copies of the page may differ from home, so that the whole page may go home.
	touched map[int]bool
}

// spots are the bytes of a page that programs use often: at edges of words, and elsewhere.
var spots = []int{0, 1, 7, 8, 9, 15, 16, 100, 1000, 1001, 2047, 2048, 4088, 4094, 4095}

// NewOracle returns the Oracle of a file of zeros.
func NewOracle(l Layout) *Oracle {
	o := &Oracle{layout: l, sizes: []int64{l.Size}, published: make(map[Client]map[int]clock),
		views: make(map[Client]Step)}
	for range l.Pages {
		pg := &oraclePage{released: o.clock(), touched: make(map[int]bool)}
		for range o.source() + 1 {
			pg.clocks = append(pg.clocks, o.clock())
		}
		pg.segments = []segment{{stores: []*oracleStore{{at: o.clock(), vals: []values{zeros}}}}}
		o.pages = append(o.pages, pg)
	}
	return o
}

// source is the agent that changes SOURCE.
func (o *Oracle) source() int { return o.layout.Devices + 1 }

func (o *Oracle) clock() clock { return make(clock, o.source()+1) }

func (o *Oracle) size() int64 { return o.sizes[len(o.sizes)-1] }

// LeastSize returns the smallest size that CPU programs may see.
func (o *Oracle) LeastSize() int64 { return slices.Min(o.sizes) }

// each calls fn for each page that [off, off+n) touches, with the part of the page in that range.
func (o *Oracle) each(off, n int64, fn func(p int, pg *oraclePage, from, to int)) {
	for p, pg := range o.pages {
		start := int64(p) * PageSize
		from, to := max(off-start, 0), min(off+n-start, PageSize)
		if from < to {
			fn(p, pg, int(from), int(to))
		}
	}
}

// cut makes a segment begin at a byte, and returns the segment's index.
func (pg *oraclePage) cut(at int) int {
	i, found := slices.BinarySearchFunc(pg.segments, at, func(s segment, at int) int { return s.from - at })
	if !found && at < PageSize {
		pg.segments = slices.Insert(pg.segments, i, segment{at, pg.segments[i-1].stores})
	}
	return i
}

// within returns the segments of [from, to).
func (pg *oraclePage) within(from, to int) []segment {
	i := pg.cut(from)
	return pg.segments[i:pg.cut(to)]
}

// store records a store of n bytes at off. Bytes past end of file are ignored.
func (o *Oracle) store(agent int, off, n int64, vals ...values) {
	o.trace.store(agent, off, min(n, o.size()-off), vals)
	o.each(off, min(n, o.size()-off), func(_ int, pg *oraclePage, from, to int) {
		c := pg.clocks[agent]
		if agent == 0 {
			c.join(pg.released)
		}
		c[agent]++
		pg.add(from, to, &oracleStore{agent: agent, at: slices.Clone(c), vals: vals})
	})
}

// everywhere records that n bytes at off are zero for all agents from now on, regardless of earlier stores.
func (o *Oracle) everywhere(off, n int64) {
	o.trace.add("zero", 0, o.trace.within(off, n), 0)
	o.each(off, n, func(_ int, pg *oraclePage, from, to int) {
		list := pg.within(from, to)
		for i := range list {
			list[i].stores = []*oracleStore{{at: o.clock(), vals: []values{zeros}}} // a clock before all others
		}
	})
}

// add adds a store, and drops stores that no agent may read any more.
func (pg *oraclePage) add(from, to int, s *oracleStore) {
	list := pg.within(from, to)
	for i := range list {
		stores := append(slices.Clone(list[i].stores), s)
		list[i].stores = slices.DeleteFunc(slices.Clone(stores), func(s *oracleStore) bool {
			return !slices.ContainsFunc(pg.clocks, func(c clock) bool { return !superseded(stores, s, c) })
		})
	}
}

// superseded reports whether at clock c a store after s is known.
func superseded(stores []*oracleStore, s *oracleStore, c clock) bool {
	return slices.ContainsFunc(stores, func(t *oracleStore) bool {
		return t != s && !t.soft && s.before(t.at) && t.before(c)
	})
}

// current returns the stores that may be read at clock c.
func current(stores []*oracleStore, c clock) (list []*oracleStore) {
	for _, s := range stores {
		if !superseded(stores, s, c) {
			list = append(list, s)
		}
	}
	return list
}

func allowed(stores []*oracleStore, off int64, b byte) bool {
	return slices.ContainsFunc(stores, func(s *oracleStore) bool {
		return slices.ContainsFunc(s.vals, func(v values) bool { return v.at(off) == b })
	})
}

// check compares bytes that an agent sees at off with those that it may see.
func (o *Oracle) check(agent int, off int64, got []byte) (err error) {
	o.trace.read(agent, off, got)
	o.each(off, int64(len(got)), func(p int, pg *oraclePage, from, to int) {
		c := pg.clocks[agent]
		if agent == 0 {
			c.join(pg.released)
		}
		if err == nil {
			err = o.checkAt(p, from, to, got[int64(p)*PageSize+int64(from)-off:], c, agent == 0)
		}
	})
	return err
}

// checkAt compares the bytes [from, to) of a page. A CPU program that sees that the file grew in SOURCE also sees the
// added bytes. It need not have noticed later changes of these bytes in SOURCE.
func (o *Oracle) checkAt(p, from, to int, got []byte, c clock, onCPU bool) error {
	pg, start := o.pages[p], int64(p)*PageSize
	list := pg.within(from, to)
	noticed := slices.Clone(c)
	noticed.join(pg.clocks[o.source()])
	least := o.LeastSize()
	for i, seg := range list {
		end := to
		if i+1 < len(list) {
			end = list[i+1].from
		}
		known, added := current(seg.stores, c), current(seg.stores, whenAdded(seg.stores, c, noticed))
		for at := seg.from; at < end; at++ {
			off, b, may := start+int64(at), got[at-from], known
			if onCPU && off >= least {
				may = added
			}
			if !allowed(may, off, b) {
				return fmt.Errorf("byte %d of page %d reads 0x%02x, which no order of events allows; it may be %s",
					at, p, b, list2text(may, off))
			}
		}
	}
	return nil
}

// whenAdded returns clock c of an agent that knows that SOURCE added the bytes of stores to the file. If it is unknown
// when SOURCE did that, it returns noticed.
func whenAdded(stores []*oracleStore, c, noticed clock) clock {
	for i := len(stores) - 1; i >= 0; i-- {
		if stores[i].firm {
			c = slices.Clone(c)
			c.join(stores[i].at)
			return c
		}
	}
	return noticed
}

func list2text(stores []*oracleStore, off int64) string {
	var all []byte
	for _, s := range stores {
		for _, v := range s.vals {
			all = append(all, v.at(off))
		}
	}
	slices.Sort(all)
	return fmt.Sprintf("[% x]", slices.Compact(all))
}
