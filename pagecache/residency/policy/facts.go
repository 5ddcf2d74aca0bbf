package policy

import (
	"cmp"
	"container/heap"
	"iter"
	"time"
)

const (
	// block is the unit in which accesses are counted: an access to a whole extent of 8 MiB counts four times in four
	// blocks. So the counts of large and small extents compare.
	block = 2 << 20
	// mostCount is the largest count. When a counter exceeds it, all counters are halved. So extents that were hot long
	// ago cool down, and extents that are hotter than others stay so (Ganguly: 27 bits).
	mostCount = 1<<27 - 1
	// mostClaimed is the largest count that claims alone can bring about. So no program can make all counters be halved
	// again and again by claiming uses. Extents that reach it compare as equals, by last use.
	mostClaimed = mostCount / 2
)

// facts is what is known about an extent.
type facts struct {
	id       ID
	bytes    int64 // size of the extent
	priority int
	// here means that it has memory; then it is book.present[at]. mapped means that it may not leave, kept that it may
	// once clients were asked.
	here, mapped, kept bool
	at                 int
	// placed is when it got memory, used when the last event about it came. Both count events.
	placed, used uint64
	// count counts accesses to its blocks, over all the times that it had memory.
	count uint64
	// written means that it was changed since it was placed.
	written bool
}

// blocks returns the size of the extent in blocks.
func (x *facts) blocks() uint64 { return uint64(max((x.bytes+block-1)/block, 1)) }

// book keeps the facts of all extents, and the times of brackets.
type book struct {
	extents map[ID]*facts
	present []*facts // the extents that have memory
	events  uint64
	left    uint64 // how many extents ever left
	brackets
}

// note updates the facts.
func (b *book) note(e Event) {
	b.events++
	if e.Kind == Began || e.Kind == Ended {
		b.brackets.note(e)
		return
	}
	x := b.extents[e.ID]
	if x == nil {
		x = &facts{id: e.ID}
		b.extents[e.ID] = x
	}
	switch e.Kind {
	case Placed:
		x.at, b.present = len(b.present), append(b.present, x)
		x.here, x.bytes, x.priority, x.placed, x.written = true, e.Bytes, e.Priority, b.events, false
	case Mapped, Unmapped:
		x.mapped, x.kept = e.Kind == Mapped, false
	case Kept:
		x.kept = true
		return
	case Left:
		x.here, x.mapped, x.kept = false, false, false
		last := b.present[len(b.present)-1]
		b.present[x.at], last.at = last, x.at
		b.present = b.present[:len(b.present)-1]
		b.left++
		return
	case Accessed:
		x.written = x.written || e.Write
		if blocks := uint64(max((e.Bytes+block-1)/block, 1)); e.Claimed == 0 {
			b.count(x, blocks)
		} else {
			x.claim(blocks, uint64(e.Claimed))
		}
	case Forgotten:
		delete(b.extents, e.ID)
		return
	}
	x.used = b.events
}

// count adds accesses to n blocks of x.
func (b *book) count(x *facts, n uint64) {
	x.count += n
	for x.count/x.blocks() > mostCount {
		for _, y := range b.extents {
			y.count /= 2
		}
	}
}

// claim adds n claimed accesses to so many blocks of x.
func (x *facts) claim(blocks, n uint64) {
	most := mostClaimed * x.blocks()
	room := most - min(x.count, most)
	if n <= room/blocks {
		room = n * blocks
	}
	x.count += room
}

// victims yields the extents that may leave, in the given order.
func (b *book) victims(order func(x, y *facts) int) iter.Seq[ID] {
	return func(yield func(ID) bool) {
		var first *facts
		h := &ranking{order: order}
		for _, x := range b.present {
			if x.mapped {
				continue
			}
			if first == nil {
				first = x
				continue
			}
			if order(x, first) < 0 {
				x, first = first, x
			}
			h.all = append(h.all, x)
		}
		if first == nil || !yield(first.id) {
			return
		}
		heap.Init(h)
		for len(h.all) > 0 && yield(heap.Pop(h).(*facts).id) {
		}
	}
}

// ranking is a heap: callers often want only the first victim, and seldom all.
type ranking struct {
	all   []*facts
	order func(x, y *facts) int
}

func (r *ranking) Len() int           { return len(r.all) }
func (r *ranking) Swap(i, j int)      { r.all[i], r.all[j] = r.all[j], r.all[i] }
func (r *ranking) Less(i, j int) bool { return r.order(r.all[i], r.all[j]) < 0 }
func (r *ranking) Push(x any)         { r.all = append(r.all, x.(*facts)) }
func (r *ranking) Pop() any {
	last := r.all[len(r.all)-1]
	r.all = r.all[:len(r.all)-1]
	return last
}

// brackets tracks how long the brackets of programs take.
type brackets struct {
	running map[Program]running
	usual   map[Program]time.Duration // of programs that have ended one
}

// running describes a program's open brackets: how many there are, and when the first one began.
type running struct {
	open  int
	since time.Duration
}

// historyWeight: the last bracket counts 1/historyWeight against earlier ones, so that one odd launch does not decide.
const historyWeight = 4

func (b *brackets) note(e Event) {
	r := b.running[e.Program]
	if e.Kind == Began {
		if r.open++; r.open == 1 {
			r.since = e.At
		}
		b.running[e.Program] = r
		return
	}
	if r.open--; r.open != 0 {
		if r.open > 0 {
			b.running[e.Program] = r
		}
		return
	}
	delete(b.running, e.Program)
	took := e.At - r.since
	if usual, known := b.usual[e.Program]; known {
		took = usual + (took-usual)/historyWeight
	}
	b.usual[e.Program] = took
}

// shortest returns the usual duration of the shortest open bracket; false if none is known.
func (b *brackets) shortest() (d time.Duration, known bool) {
	for p := range b.running {
		if usual, ok := b.usual[p]; ok && (!known || usual < d) {
			d, known = usual, true
		}
	}
	return d, known
}

// byCount orders extents by accesses per block, the coldest first, and equals by last use.
func byCount(x, y *facts) int {
	return cmp.Or(cmp.Compare(x.count*y.blocks(), y.count*x.blocks()), byUse(x, y))
}

func byUse(x, y *facts) int { return cmp.Compare(x.used, y.used) }

func byAge(x, y *facts) int { return cmp.Compare(x.placed, y.placed) }
