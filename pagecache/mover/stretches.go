package mover

import (
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Past the host's page cache, pieces are read in the order of the file. Through it, several stretches of a file are
// read at once, each in order: then the kernel reads ahead in each of them, and the disk has more to do
// (docs/dev/adr/0010-past-the-page-cache.md). A stretch that is done makes room for the next one, so the page cache has
// little at a time.

// mostStretches is how many stretches are read at once, and stretchPages the size of one. What the kernel reads past
// its end is read twice, so it is long. Only tests and benchmarks change these.
var (
	mostStretches            = 4
	stretchPages  page.Index = 256 << 20 >> page.Shift
)

// stretches is the order in which a Fill takes its pieces, which is chosen while it runs.
type stretches struct {
	left []stretch // not all of their pieces are chosen; protected by Fill.mu
	last int       // the one that was chosen from last; protected by Fill.mu
	// order has the numbers of the pieces in the order in which they are taken; nil means ascending. The first n are
	// immutable, the others protected by Fill.mu.
	order []int32
	n     atomic.Int32
}

// stretch is the pieces from next up to end.
type stretch struct{ next, end int }

func (s *stretches) begin(pieces []Piece) {
	s.order = make([]int32, len(pieces))
	for i := range pieces {
		if n := len(s.left); n > 0 && pieces[i].first()/stretchPages == pieces[i-1].first()/stretchPages {
			s.left[n-1].end++
		} else {
			s.left = append(s.left, stretch{i, i + 1})
		}
	}
}

// choose chooses the next piece, from one of the first most stretches.
func (s *stretches) choose(most int) {
	s.last = (s.last + 1) % min(most, len(s.left))
	from := &s.left[s.last]
	s.order[s.n.Load()] = int32(from.next)
	s.n.Add(1)
	if from.next++; from.next == from.end {
		s.left = append(s.left[:s.last], s.left[s.last+1:]...)
	}
}

// at returns the number of the piece that is taken as number i, which is chosen.
func (p *Fill) at(i int) int {
	if p.stretches.order == nil {
		return i
	}
	return int(p.stretches.order[i])
}

// chosen returns how many pieces are chosen.
func (p *Fill) chosen() int {
	if p.stretches.order == nil {
		return len(p.Pieces)
	}
	return int(p.stretches.n.Load())
}

// chooseLocked chooses the pieces that are taken before number to.
func (p *Fill) chooseLocked(to int) {
	for p.chosen() < min(to, len(p.Pieces)) {
		most := 1
		if p.cold.Load() && p.From.Cold != nil && p.From.Cold.way.isThrough() {
			most = mostStretches
		}
		p.stretches.choose(most)
	}
}

const (
	// blockPages is the size of a block: enough for the kernel to read no further than into the next one.
	blockPages page.Index = 16 << 20 >> page.Shift
	// blocksKept is how many blocks behind a read stay in the page cache. If they were dropped while other reads are
	// still in them, the kernel would read them again.
	blocksKept = 3
)

// ColdFile is what is known of a file that is read from a disk: by which way its pages come, and of which of them the
// host's page cache had nothing before they were read through it. So whatever the page cache has of these is there
// because of that, read ahead by the kernel or not, and is dropped. Fills of the file share it.
type ColdFile struct {
	way *ColdWay // immutable

	mu    sync.Mutex
	users int // Reads that read through the page cache; protected by mu
	// blocks has the pages of each block, by its number, up to the end of what was read; nil if the page cache had
	// something of the block. Without users there are none. Protected by mu, and so is home, which keeps the file open.
	blocks map[page.Index]*page.Range
	home   *hold
}

// NewColdFile returns what is known of a file on a disk.
func NewColdFile(way *ColdWay) *ColdFile { return &ColdFile{way: way} }

// join adds a user.
func (c *ColdFile) join(home *hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.users++; c.users == 1 {
		home.users.Add(1)
		c.home, c.blocks = home, make(map[page.Index]*page.Range)
	}
}

// leave undoes join. The last one drops what was read, in the background.
func (c *ColdFile) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.users--; c.users > 0 {
		return
	}
	home, blocks := c.home, c.blocks
	c.home, c.blocks = nil, nil
	go func() {
		defer home.drop()
		for _, x := range blocks {
			if x != nil {
				home.from.drop(*x)
			}
		}
	}()
}

// enter notes the beginning of a read. ours means that the page cache had nothing of its blocks; without users that is
// not known. enter asks about blocks that are not known, and about one more, before the kernel reads ahead into it.
// behind is earlier pages that are not needed any more.
func (c *ColdFile) enter(from *Source, rg page.Range) (ours bool, behind page.Range) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.home == nil || c.home.from.Direct != from.Direct {
		return false, behind
	}
	ours = true
	last := (rg.End - 1) / blockPages
	for i := rg.Start / blockPages; i <= last+1; i++ {
		all := page.Range{Start: i * blockPages, End: (i + 1) * blockPages}
		x, known := c.blocks[i]
		if !known {
			if n, err := from.Direct.Cached(all.Offset(), all.Bytes()); err == nil && n == 0 {
				x = &page.Range{Start: all.Start, End: all.Start}
			}
			c.blocks[i] = x
			if old := c.blocks[i-1-blocksKept]; old != nil {
				behind = *old
			}
		}
		if i > last {
			break
		}
		if ours = ours && x != nil; x != nil {
			x.End = max(x.End, min(rg.End, all.End))
		}
	}
	return ours, behind
}

// drop makes the host's page cache drop pages.
func (d *Source) drop(rg page.Range) {
	if !rg.Empty() {
		d.Direct.Drop(rg.Offset(), rg.Bytes())
	}
}
