package cleanread

import (
	"math"

	"github.com/gaiafs/gaiafs/internal/page"
)

// A read of 4 KiB through the kernel's page cache is a request to the daemon if the kernel lacks the page. So when
// programs read a chunk again in this way, the kernel gets all of it, and later reads need no request. A chunk that is
// read twice is mostly read more often.
const (
	// pushReads is the number of reads after which a chunk is pushed.
	pushReads = 2
	// mostPushes is the most pushes that run at once. They wait for each other in the kernel.
	mostPushes = 4
)

// push gives the kernel the pages of k in the background, unless enough others are doing the same. Then k goes. The
// caller is a user of k.
func (k *chunk) push() {
	c := k.f.c
	if c.pushes.Add(1) > mostPushes || !k.claimPush() {
		c.pushes.Add(-1)
		return
	}
	k.users.Add(1)
	end := func() {
		c.pushes.Add(-1)
		k.done()
	}
	if !c.inBackground(func() {
		defer end()
		k.pushNow()
	}) {
		end()
	}
}

// claimPush reports whether k is in the table and nobody pushes it.
func (k *chunk) claimPush() bool {
	k.f.table.mu.Lock()
	defer k.f.table.mu.Unlock()
	if k.buffered < k.pushAt || k.f.table.chunks[k.index] != k {
		return false
	}
	k.pushAt = math.MaxInt
	return true
}

// pushNow is push in the background.
func (k *chunk) pushNow() {
	f := k.f
	pushed := k.giveToKernel()
	f.table.mu.Lock()
	if pushed {
		k.read = k.bitsOf(k.pages)
	} else {
		k.pushAt = 2 * k.buffered
	}
	f.table.mu.Unlock()
	if pushed {
		f.dropChunk(k, true)
	}
}

// giveToKernel reports whether the kernel took the pages of k.
func (k *chunk) giveToKernel() bool {
	f := k.f
	r, _ := regionsOf(k.pages)
	s := f.valid(r)
	if s == nil || !s.serves {
		return false
	}
	// The kernel would take the last part of a file for a whole page.
	n := min(k.pages.End, page.Index(s.size>>page.Shift)).Offset() - k.pages.Offset()
	current := func() bool {
		s := f.valid(r)
		return s != nil && s.held && s.epoch == k.epoch
	}
	if n <= 0 || !f.ex.Push(k.pages.Offset(), k.buf[:n], current) {
		return false
	}
	f.ex.Count(func(c *Counters) { c.PushedBytes.Add(n) })
	return true
}
