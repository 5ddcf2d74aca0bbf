package model

import (
	"fmt"
	"slices"
)

// Oracle says which values a read may return, from the order of events alone. A device's stores happen before whatever
// an acquire or a CPU program does after their release returned. What CPU programs did happens before whatever an
// acquire returns afterwards. A read may return what a store left unless another store came between the two in that
// order. The Oracle knows nothing of how that is brought about.
//
// It watches every byte, and orders events page by page, since releases and acquires have ranges.
//
// Agents are the CPU, which is 0, the devices, and whoever writes in SOURCE, see source.go.
type Oracle struct {
	layout Layout
	// sizes are what programs on the CPU may take for the file's size. The last is the real one; the others are of the
	// time before changes in SOURCE that nobody needs to have noticed.
	sizes []int64
	pages []*oraclePage
	// published has, per open release, the clocks of its pages when it began.
	published map[Client]map[int]clock
	views     map[Client]Step // the last View of each
	// junk says that bytes past end of file may be anything: a device's program stored there, or SOURCE was cut.
	junk  bool
	times oracleTimes
	// trace, if not nil, records events.
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
	// vals are what each byte may have become. A copy of bytes that several stores raced for has several.
	vals []values
	// soft is set on a store in SOURCE that the mount may write over, since it was using the page at that time.
	soft bool
	// firm is set on what SOURCE added to the end of the file: nobody on the mount can have had anything there.
	firm bool
}

// before reports whether the store is known at clock c.
func (s *oracleStore) before(c clock) bool { return c[s.agent] >= s.at[s.agent] }

// values are what a store left: the i-th byte after offset is first+i, or first with same, or data[i].
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

// is reports whether v and w leave the same bytes for the same reason.
func (v *values) is(w values) bool {
	switch {
	case v.same || w.same:
		return v.same && w.same && v.first == w.first && v.data == nil && w.data == nil
	case v.data != nil || w.data != nil:
		return v.data != nil && w.data != nil && v.offset == w.offset && &v.data[0] == &w.data[0]
	}
	return v.first-byte(v.offset) == w.first-byte(w.offset)
}

// appendValues appends those of more that are not in list.
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

// segment is a part of a page whose bytes the same stores wrote. It goes up to the next one.
type segment struct {
	from   int
	stores []*oracleStore
}

type oraclePage struct {
	// clocks has what each agent knows of. released is what everyone knows who acquires.
	clocks   []clock
	released clock
	segments []segment
	// touched has the agents whose copies of the page may differ from home, so that it may go home as a whole.
	touched map[int]bool
}

// spots are the bytes of a page that programs like to use, at edges of words and elsewhere.
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

// LeastSize is the smallest size that programs on the CPU may take the file to have.
func (o *Oracle) LeastSize() int64 { return slices.Min(o.sizes) }

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

// cut makes a segment begin at a byte and returns its index.
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

// store records n bytes at off. Bytes past end of file are nobody's.
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

// everywhere records that n bytes at off are zero for everybody from now on, whatever anybody knew or stored.
func (o *Oracle) everywhere(off, n int64) {
	o.trace.add("zero", 0, o.trace.within(off, n), 0)
	o.each(off, n, func(_ int, pg *oraclePage, from, to int) {
		list := pg.within(from, to)
		for i := range list {
			list[i].stores = []*oracleStore{{at: o.clock(), vals: []values{zeros}}} // its clock is before every other
		}
	})
}

// add adds a store, and drops those that nobody may read any more.
func (pg *oraclePage) add(from, to int, s *oracleStore) {
	list := pg.within(from, to)
	for i := range list {
		stores := append(slices.Clone(list[i].stores), s)
		list[i].stores = slices.DeleteFunc(slices.Clone(stores), func(s *oracleStore) bool {
			return !slices.ContainsFunc(pg.clocks, func(c clock) bool { return !superseded(stores, s, c) })
		})
	}
}

// superseded reports whether at clock c another store is known that came after s.
func superseded(stores []*oracleStore, s *oracleStore, c clock) bool {
	return slices.ContainsFunc(stores, func(t *oracleStore) bool {
		return t != s && !t.soft && s.before(t.at) && t.before(c)
	})
}

// current returns those of stores that may be read at clock c.
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

// check compares bytes that an agent sees at off with what it may see.
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

// checkAt compares the bytes [from, to) of a page. A program on the CPU that sees that SOURCE made the file longer sees
// what was added, too. What SOURCE made of these bytes since, it need not have noticed.
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

// whenAdded is clock c for somebody who knows that SOURCE added the bytes of stores to the file: noticed, where it is
// not known when it did.
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
