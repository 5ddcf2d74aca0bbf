package prefetch

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

// CoverageOptions says how far Coverage goes.
type CoverageOptions struct {
	// Most is the most pages that may be fetched and not used yet.
	Most int64
	// Sections is the number of sections of 16 MiB that are remembered. What is known of others is forgotten: it costs
	// 2 KiB each.
	Sections int
}

// DefaultCoverage keeps 256 MiB ahead, which hundreds of blocks need that begin anywhere in the next 100 MiB, and
// remembers 128 GiB, in 16 MiB of memory.
var DefaultCoverage = CoverageOptions{Most: 256 << 20 >> page.Shift, Sections: 8 << 10}

const (
	// levels of nodes: a node of level l is 2^l pages, aligned. The highest has MaxWindow, and is a section.
	levels = sectionShift
	// firstLevel is the level of MinWindow.
	firstLevel = 7
	// enough is the share of what is fetched that must be expected to be used. Nodes that are waited for make the
	// estimate lower than it turns out.
	enough = 0.8
	// frontierShare is the share of the nodes that must be opened in order for the next one to be fetched before its
	// time.
	frontierShare = 0.9
	// memory is the number of nodes of one level that are remembered with full weight, queue of those that are waited
	// for.
	memory = 16 << 10
	queue  = 4 << 10
	// trust is what the level below counts as for a level, in nodes.
	trust = 2
	// patience is how long a node is waited for, in times that others took. Where a thousand blocks read at once, some
	// wait for the disk and some do not.
	patience = 8
	// longest bounds the average of the times: 256 MiB.
	longest = 256 << 20 >> page.Shift
	// firstCredit is the most pages ahead before any of them was used: 2 MiB.
	firstCredit = 2 << 20 >> page.Shift
)

// Coverage predicts for hundreds of programs, or blocks of a GPU's kernel, that read one file at once, so that their
// accesses come in no order. Streams cannot be told apart there, and need not be: it is enough to know how much of the
// surroundings of a page is read once the page was.
//
// The file is a tree of nodes of two halves, from two pages up to 16 MiB. A node is opened when the first of its pages
// is read, and closed when a page of the other half is. For each level Coverage counts nodes that were closed, and
// nodes that were not although they have been open for longer than others take. The ratio is the chance that the other
// half of a node is read once one was; by the chances from the bottom up it knows how much of a node will be used. An
// access has the largest node fetched of which that is enough, and where nodes are opened one beside the other, the
// next one as well: the frontier moves on while its last node is being read. Where nothing is used but what is asked
// for, nothing is fetched. Time is counted in pages read for the first time, so that it does not pass where everybody
// waits.
//
// Nodes beside one that was read already are counted apart from those that lie alone, which tells a moving frontier
// from accesses that jump about in the same file.
//
// What is fetched and not used yet is bounded by what was used before, so that a wrong guess at the start is a small
// one. Rejected: a tracker for each stream, which needs an order to find them by; and a fixed share of resident blocks
// (Tree), which is too low for sparse accesses and too high for a frontier.
type Coverage struct {
	o        CoverageOptions
	end      page.Index
	now      uint64 // pages that were read
	sections map[page.Index]*section
	order    []page.Index // of sections, as they were made
	level    [levels + 1]level
	// ahead is the pages asked for and not used yet, used those that were.
	ahead, used int64
}

// level is what is known of the nodes of one size.
type level struct {
	// nodes counts those that were closed or have been open for too long, and of them those that were closed, be it
	// late; first for nodes beside others, then for those that were alone when they were opened.
	nodes [2]struct{ known, closed float64 }
	// opened counts nodes, and those of them that were beside one before them, and after them.
	opened, up, down float64
	// open has nodes that were opened and not closed: those that are waited for, in the order in which they were opened
	// in waiting, and those that were given up, in given. The queues have some besides that were closed.
	open           map[page.Index]node
	waiting, given []page.Index
	// begun is the number of nodes that are waited for, and since the sum of the times when they were opened.
	begun int
	since uint64
	// took is how long nodes were open, on average; 0 until one was closed.
	took float64
}

// node is one that is open.
type node struct {
	since       uint64
	alone, late bool
}

// section is what is known of 16 MiB.
type section struct{ read, asked bitmap }

// NewCoverage makes a Coverage. Numbers that are not positive stand for those of DefaultCoverage.
func NewCoverage(o CoverageOptions) *Coverage {
	if o.Most <= 0 {
		o.Most = DefaultCoverage.Most
	}
	if o.Sections <= 0 {
		o.Sections = DefaultCoverage.Sections
	}
	return &Coverage{o: o, end: endless, sections: make(map[page.Index]*section)}
}

// Access implements Predictor.
func (c *Coverage) Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range {
	rg = rg.Intersect(page.Range{End: c.end})
	if rg.Empty() {
		return ahead
	}
	fresh := false
	for i := rg.Start; i < rg.End; i++ {
		fresh = c.touch(i) || fresh
	}
	if !fresh || p == Random {
		return ahead
	}
	l := c.largest(rg.End - 1)
	next, back := c.frontier(l)
	if p == Sequential {
		l, next = max(l, firstLevel), true
	}
	if l == 0 {
		return ahead
	}
	at, size := (rg.End-1)>>l, page.Index(1)<<l
	ahead = c.ask(at*size, size, ahead)
	switch {
	case next:
		ahead = c.ask((at+1)*size, size, ahead)
	case back && at > 0:
		ahead = c.ask((at-1)*size, size, ahead)
	}
	return ahead
}

// touch notes that a page was read, and reports whether that is the first time.
func (c *Coverage) touch(i page.Index) bool {
	at, bit := place(i)
	k := c.section(at)
	if k.read.has(bit) {
		return false
	}
	c.now++
	if k.asked.has(bit) {
		k.asked.drop(bit)
		c.ahead--
		c.used++
	}
	for l := 1; l <= levels; l++ {
		half := 1 << (l - 1)
		mine := bit &^ (half - 1)
		if k.read.any(mine, half) {
			break // nothing is new here or above
		}
		if k.read.any(mine^half, half) {
			c.close(l, i>>l)
			break
		}
		c.begin(l, i>>l)
	}
	k.read.add(bit)
	return true
}

// begin opens a node.
func (c *Coverage) begin(l int, n page.Index) {
	x := &c.level[l]
	if x.open == nil {
		x.open = make(map[page.Index]node)
	}
	for len(x.waiting) > 0 {
		first := x.waiting[0]
		o, is := x.open[first]
		if is && len(x.waiting) < queue && (x.took == 0 || float64(c.now-o.since) <= patience*x.took+1) {
			break
		}
		x.waiting = x.waiting[1:]
		if is && !o.late {
			o.late = true
			x.open[first] = o
			x.given = append(x.given, first)
			x.leave(o)
			x.count(o.alone, 1, 0)
		}
	}
	for len(x.given) > queue {
		if x.open[x.given[0]].late {
			delete(x.open, x.given[0])
		}
		x.given = x.given[1:]
	}
	if o, is := x.open[n]; is && !o.late {
		x.leave(o) // what was known of its pages is forgotten, and it is opened again
	}
	before, after := c.reads(n-1, l), c.reads(n+1, l)
	x.open[n] = node{since: c.now, alone: !before && !after}
	x.waiting = append(x.waiting, n)
	x.begun++
	x.since += c.now
	x.opened++
	x.up += float64(b2i(before))
	x.down += float64(b2i(after))
	if x.opened >= memory {
		x.opened, x.up, x.down = x.opened/2, x.up/2, x.down/2
	}
}

// leave takes a node out of those that are waited for.
func (x *level) leave(o node) {
	x.begun--
	x.since -= o.since
}

// close closes a node, unless it is forgotten.
func (c *Coverage) close(l int, n page.Index) {
	x := &c.level[l]
	o, is := x.open[n]
	if !is {
		return
	}
	delete(x.open, n)
	if o.late {
		x.count(o.alone, 0, 1)
	} else {
		x.leave(o)
		x.count(o.alone, 1, 1)
	}
	took := min(float64(c.now-o.since), longest)
	if x.took == 0 {
		x.took = took
	}
	x.took += (took - x.took) / 16
}

// count counts a node whose fate is known, or is another than it was taken for, and lets old ones fade.
func (x *level) count(alone bool, known, closed float64) {
	t := &x.nodes[b2i(alone)]
	t.known += known
	t.closed = min(t.closed+closed, t.known)
	if t.known >= memory {
		t.known, t.closed = t.known/2, t.closed/2
	}
}

// chance returns the chance that a node is closed, given that of the level below. Nodes that are waited for count as
// lost for as much as their time is over, on average.
func (x *level) chance(now uint64, alone bool, below float64) float64 {
	t := x.nodes[b2i(alone)]
	all := x.nodes[0].known + x.nodes[1].known
	if t.known == 0 {
		return 0
	}
	waiting := 0.0
	if x.took > 0 {
		waiting = float64(now*uint64(x.begun)-x.since) / (patience*x.took + 1) * t.known / all
	}
	return (t.closed + trust*below) / (t.known + waiting + trust)
}

// largest returns the level of the largest node around page i of which enough is expected to be used; 0: none.
func (c *Coverage) largest(i page.Index) (best int) {
	use, chance := 1.0, 0.5
	for l := 1; l <= levels; l++ {
		x := &c.level[l]
		chance = x.chance(c.now, x.open[i>>l].alone, chance)
		if use *= (1 + chance) / 2; use < enough {
			break
		}
		best = l
	}
	return best
}

// frontier reports whether nodes of level l are opened in ascending order, or in descending order. Where too few were
// opened to say, those of the levels below tell.
func (c *Coverage) frontier(l int) (up, down bool) {
	for ; l > 1 && c.level[l].opened < 4; l-- {
	}
	x := &c.level[l]
	return x.opened > 1 && x.up >= frontierShare*(x.opened-1), x.opened > 1 && x.down >= frontierShare*(x.opened-1)
}

// reads reports whether a page of node n of level l was read.
func (c *Coverage) reads(n page.Index, l int) bool {
	if n < 0 {
		return false
	}
	at, bit := place(n << l)
	k := c.sections[at]
	return k != nil && k.read.any(bit, 1<<l)
}

// ask appends what was neither read nor asked for of the n pages from start on, as far as credit goes.
func (c *Coverage) ask(start, n page.Index, ahead []page.Range) []page.Range {
	most := min(c.o.Most, firstCredit+4*c.used)
	end := min(start+n, c.end)
	// Credit that comes back page by page is worth no request.
	if most-c.ahead < min(int64(n), firstCredit)/4 {
		return ahead
	}
	for i := start; i < end && c.ahead < most; {
		at, bit := place(i)
		k := c.section(at)
		known := (k.read[bit/64] | k.asked[bit/64]) >> (bit % 64)
		if skip := bits.TrailingZeros64(^known); skip > 0 {
			i += page.Index(min(skip, 64-bit%64))
			continue
		}
		k.asked.add(bit)
		c.ahead++
		ahead = add(ahead, page.Range{Start: i, End: i + 1}, c.end)
		i++
	}
	return ahead
}

// section returns what is known of a section, for which it makes room by forgetting the one made first.
func (c *Coverage) section(at page.Index) *section {
	k := c.sections[at]
	if k != nil {
		return k
	}
	if len(c.order) >= c.o.Sections {
		c.forget(c.order[0])
		c.order = c.order[1:]
	}
	k = new(section)
	c.sections[at] = k
	c.order = append(c.order, at)
	return k
}

func (c *Coverage) forget(at page.Index) {
	if k := c.sections[at]; k != nil {
		c.ahead -= int64(k.asked.count())
		delete(c.sections, at)
	}
}

// Unused implements Predictor. What was fetched in vain costs as much credit as four times as much use earned.
func (c *Coverage) Unused(rg page.Range) {
	for i := rg.Start; i < rg.End; {
		at, bit := place(i)
		k := c.sections[at]
		if k == nil {
			i = (at + 1) << sectionShift
			continue
		}
		if k.asked.has(bit) {
			k.asked.drop(bit)
			c.ahead--
			c.used = max(c.used-4, 0)
		}
		i++
	}
}

// Resize implements Predictor.
func (c *Coverage) Resize(end page.Index) {
	c.end = end
	last, bit := place(end)
	keep := c.order[:0]
	for _, at := range c.order {
		if at > last {
			c.forget(at)
			continue
		}
		keep = append(keep, at)
	}
	c.order = keep
	if k := c.sections[last]; k != nil {
		for i := bit; i < sectionPages; i++ {
			k.read.drop(i)
			if k.asked.has(i) {
				k.asked.drop(i)
				c.ahead--
			}
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
