package cleanread

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// A copy from a device takes about as long for 128 KiB as for 4: what it costs is to begin and to end it. So a small
// read that a device serves brings the chunk around it, and the next ones there find it in host memory, if there are
// any before the chunk goes. Whether there are is learned from the chunks that went.
const (
	// AroundPages is the most pages of a read that brings what is around it.
	AroundPages = ChunkPages / 4
	// aroundTimes is how many times as long as the read alone a copy of the chunk may take. It has to be faster than
	// the disk, too.
	aroundTimes = 2
	// AroundDebt is how many chunks in a row may come to nothing until no more are fetched but one for every aroundTry
	// reads.
	AroundDebt = 256
	aroundTry  = 64
)

// noteReads notes how often a chunk that goes was read.
func (p *chunkTable) noteReads(reads int) {
	if reads < 2 { // the first is the one that brought it
		p.debt = min(p.debt+1, AroundDebt)
		return
	}
	p.debt = max(p.debt-reads, 0)
}

// newChunkAround makes the chunk of rg, pages of a file of size bytes; nil if it is not to be fetched, or is there.
func (f *File) newChunkAround(rg page.Range, size int64) *chunk {
	i := int64(rg.Start >> chunkShift)
	p := &f.table
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepareLocked(size)
	if p.closed || p.chunks[i] != nil {
		return nil
	}
	if p.debt == AroundDebt {
		if p.skipped++; p.skipped%aroundTry != 0 {
			return nil
		}
	}
	k := f.addChunkLocked(i, page.Range{Start: page.Index(i << chunkShift),
		End: min(page.Index((i+1)<<chunkShift), p.end)})
	k.around = true
	return k
}

// readAround reads len(p) bytes at off of a file of size bytes, together with the chunk around them, from a device. It
// returns how many it read, all or none. fromHome says that home is to be read: the device failed or did not answer in
// time, or it is home's turn to be tried.
func (f *File) readAround(ctx context.Context, p []byte, off, size int64) (n int, fromHome bool) {
	c, began := f.c, time.Now()
	rg := page.Covering(off, int64(len(p)))
	if !c.fetchesMore || rg.Len() > AroundPages || rg.Start>>chunkShift != (rg.End-1)>>chunkShift {
		return 0, false
	}
	if c.ageChunks(); c.fullOfChunks() {
		return 0, false
	}
	k := f.newChunkAround(rg, size)
	if k == nil {
		return 0, false
	}
	plan, fromHome := f.planAround(ctx, k, int64(len(p)))
	if plan == nil || !plan.Start() {
		k.fill(nil)
		return 0, fromHome
	}
	if !c.wait(plan) {
		f.ex.Count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
		k.fill(nil)
		return 0, true
	}
	isHome := f.isHome(plan)
	failed := plan.Err() != nil
	if failed {
		f.ex.Count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
	}
	if isHome {
		n = copy(p, plan.Buf()[off-k.pages.Offset():])
		f.ex.Count(func(c *Counters) { c.DeviceReads.Add(1); c.DeviceReadBytes.Add(int64(n)) })
		k.note(off, n)
	}
	// The one who waits has its bytes.
	fill := func() { f.arrived(plan, []*chunk{k}, isHome, int64(len(p))) }
	if failed || !c.inBackground(fill) {
		fill()
	}
	c.around.Spent(int64(len(p)), time.Since(began))
	return n, failed
}

// planAround plans the copy of k, of which somebody waits for n bytes; nil: it is not worth it, or home is to be tried.
func (f *File) planAround(ctx context.Context, k *chunk, n int64) (plan *deviceCopy, tryHome bool) {
	facts := f.facts(ctx, k.pages)
	best, took := f.fastest(facts, k.pages, n)
	if best == nil {
		return nil, false // readDeviceOrHome decides
	}
	if f.homesTurn(n, took) {
		return nil, true
	}
	f.probe(facts, k.pages, best)
	if plan = f.plan(facts, best, k.pages); plan == nil {
		return nil, false
	}
	plan.beUrgent(took)
	k.epoch = plan.epoch
	k.copy.Store(plan.Read)
	return plan, false
}
