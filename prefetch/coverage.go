package prefetch

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

// CoverageOptions limits Coverage.
type CoverageOptions struct {
	// Most is the most pages that may be fetched and not yet used.
	Most int64
	// Sections is how many sections of 16 MiB are remembered. The oldest ones are forgotten. Each costs 1 KiB.
	Sections int
}

// DefaultCoverage keeps up to 256 MiB ahead, which hundreds of blocks need if they begin anywhere in the next 100 MiB.
// It remembers 128 GiB, in about 8 MiB of memory.
var DefaultCoverage = CoverageOptions{Most: 256 << 20 >> page.Shift, Sections: 8 << 10}

const (
	// levels is the number of levels of nodes. A node of level l is 2^l pages, aligned. The highest node has MaxWindow
	// pages, and is a section.
	levels = sectionShift
	// firstLevel is the level of MinWindow.
	firstLevel = 7
	// enough is the share of fetched pages that must be expected to be used. Pending nodes make the estimate too low at
	// first.
	enough = 0.8
	// frontierShare is the share of nodes that must open in order. Then the next node is fetched in advance.
	frontierShare = 0.9
	// memory is how many nodes of a level are remembered with full weight, queue how many pending nodes are.
	memory = 16 << 10
	queue  = 4 << 10
	// trust is the weight, in nodes, of the level below in a level's estimate.
	trust = 2
	// patience is how long a node stays pending, as a multiple of the time that others took. If a thousand blocks read
	// at once, some wait for the disk and some do not.
	patience = 8
	// longest bounds the average of the times: 256 MiB.
	longest = 256 << 20 >> page.Shift
	// firstCredit is the most pages ahead before any of them was used: 2 MiB.
	firstCredit = 2 << 20 >> page.Shift
)

// Coverage predicts for hundreds of programs, or thread blocks of a GPU kernel, that read one file at once, so that
// their accesses come in no order. It does not try to tell streams apart. It is enough to know how much of a page's
// surroundings is read once the page was.
//
// The file is a tree of nodes. Each has two halves; the sizes go from two pages to 16 MiB. A node opens when the first
// of its pages is read, and closes when a page of the other half is read. For each level, Coverage counts the nodes
// that closed, and those that stayed open for longer than others take. The ratio is the chance that the other half of a
// node is read once one half was. From these chances, level by level, it computes how much of a node will be used. An
// access fetches the largest node of which enough will be used. If nodes open next to each other, it also fetches the
// next one, so that the frontier moves on while its last node is being read. If programs use nothing but what they ask
// for, nothing is fetched. Time counts pages read for the first time, so it stands still while everybody waits.
//
// Nodes next to a node that was already read are counted separately from lone ones. That distinguishes a moving
// frontier from random accesses in the same file.
//
// Pages fetched and not yet used are bounded by pages used before, so that a wrong guess at the start is small.
// Rejected: a tracker per stream, which needs some order to find the streams by; and a fixed share of resident blocks
// (Tree), which is too low for sparse accesses and too high for a frontier.
type Coverage struct {
	o        CoverageOptions
	end      page.Index
	now      uint64 // pages read so far
	sections map[page.Index]*section
	order    []page.Index // of sections, oldest first
	level    [levels + 1]level
	// ahead counts pages asked for and not yet used, used those that were used.
	ahead, used int64
}

// level is what is known about the nodes of one size.
type level struct {
	// nodes counts the nodes that closed or were open for too long (known), and of these the ones that closed, even
	// late. The first element is for nodes next to others, the second for nodes that were alone when they opened.
	nodes [2]struct{ known, closed float64 }
	// opened counts nodes; up and down count those of them that had a read neighbour before or after them.
	opened, up, down float64
	// open has the nodes that opened and did not close. waiting has the pending ones in the order in which they opened,
	// given those that were given up. The queues may also have nodes that closed.
	open           map[page.Index]node
	waiting, given []page.Index
	// begun is the number of pending nodes, and since the sum of the times when they opened.
	begun int
	since uint64
	// took is the average time from open to close; 0 until a node has closed.
	took float64
}

// node is an open node.
type node struct {
	since       uint64
	alone, late bool
}

// section is what is known about 16 MiB of the file.
type section struct{ read, asked bitmap }

// NewCoverage makes a Coverage. For numbers that are not positive, DefaultCoverage's are used.
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

// touch notes that a page was read, and reports whether it was the first time.
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
		x.leave(o) // its pages were forgotten, and it opens again
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

// leave removes a node from the pending ones.
func (x *level) leave(o node) {
	x.begun--
	x.since -= o.since
}

// close closes a node, unless it was forgotten.
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

// count counts a node whose fate is known or has changed, and lets old ones fade.
func (x *level) count(alone bool, known, closed float64) {
	t := &x.nodes[b2i(alone)]
	t.known += known
	t.closed = min(t.closed+closed, t.known)
	if t.known >= memory {
		t.known, t.closed = t.known/2, t.closed/2
	}
}

// chance returns the chance that a node closes, given the chance of the level below. Pending nodes count partly as
// lost, by how much of their time is over on average.
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

// largest returns the level of the largest node around page i of which enough will be used; 0: none.
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

// frontier reports whether nodes of level l open in ascending order, and whether in descending order. If too few have
// opened to tell, it uses a lower level.
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

// ask appends those of the n pages from start on that were neither read nor asked for, as far as credit allows.
func (c *Coverage) ask(start, n page.Index, ahead []page.Range) []page.Range {
	most := min(c.o.Most, firstCredit+4*c.used)
	end := min(start+n, c.end)
	// Credit that comes back page by page is not worth a request.
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

// section returns a section. To make room, it forgets the oldest one.
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

// Unused implements Predictor. A page fetched in vain costs as much credit as four used pages earn.
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
