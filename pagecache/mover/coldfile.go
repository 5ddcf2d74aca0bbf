package mover

import (
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// blockPages is the size of a block: enough for the kernel to read no further than into the next one.
	blockPages page.Index = 16 << 20 >> page.Shift
	// blocksKept is how many blocks behind a read stay in the page cache, 1 GiB of them, for two reasons. If they were
	// dropped while other reads are still in them, the kernel would read them again. And if many reads ran at once, it
	// often takes 150 ms of a processor to drop 1 GiB. So most files are dropped at the end, in the background.
	blocksKept = 64
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
