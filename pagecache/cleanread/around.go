package cleanread

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// A copy of 128 KiB from a device takes about as long as a copy of 4 KiB: its cost is in the start and the end. So a
// small read that a device serves brings the chunk around it. Later reads nearby find their bytes in host memory, if
// they come before the chunk goes. The chunks that went tell whether such reads come.
const (
	// AroundPages is the most pages of a read that brings the chunk around it.
	AroundPages = ChunkPages / 4
	// aroundTimes bounds the time to copy the chunk: this many times that of the read alone.
	aroundTimes = 2
	// aroundReads is the number of reads that share the time to copy the chunk. For each of them, it must be faster
	// than the disk. Chunks that are read less often add to the debt, unless their pages changed: it may be otherwise
	// the next time. But if AroundDebt chunks in a row were read less often, for whatever reason, one read pays for
	// all.
	aroundReads = 2
	// AroundDebt is how many chunks in a row may be useless. After that, only one read in aroundTry brings a chunk.
	AroundDebt = 256
	aroundTry  = 64
)

// noteReads notes how often an outgoing chunk was read. changed says that its pages changed, so nobody could read it
// any more.
func (p *chunkTable) noteReads(reads int, changed bool) {
	note := func(count int) int {
		if reads < 2 { // the first read is the one that brought the chunk
			return min(count+1, AroundDebt)
		}
		return max(count-reads, 0)
	}
	p.lone = note(p.lone)
	if !changed || reads >= 2 {
		p.debt = note(p.debt)
	}
}

// newChunkAround makes the chunk of rg, in a file of size bytes. It returns nil if the chunk exists or is not worth
// fetching.
func (f *File) newChunkAround(rg page.Range, size int64) *chunk {
	i := int64(rg.Start >> chunkShift)
	p := &f.table
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepareLocked(size)
	if p.closed || p.chunks[i] != nil {
		return nil
	}
	share := int64(aroundReads)
	if p.debt == AroundDebt || p.lone == AroundDebt {
		if p.skipped++; p.skipped%aroundTry != 0 {
			if p.debt == AroundDebt {
				return nil
			}
			share = 1
		}
	}
	k := f.addChunkLocked(i, page.Range{Start: page.Index(i << chunkShift),
		End: min(page.Index((i+1)<<chunkShift), p.end)})
	k.around, k.share = true, share
	return k
}

// readAround reads len(p) bytes at off of a file of size bytes from a device, together with the chunk around them. It
// returns len(p) or 0. fromHome says that the caller must read home: the device failed or did not answer in time, or it
// is home's turn to be tried. direct is as for Serve.
func (f *File) readAround(
	ctx context.Context, p []byte, off, size int64, direct bool,
) (n int, fromHome bool) {
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
		k.note(off, n, direct)
	}
	// The waiting reader has its bytes already.
	fill := func() { f.arrived(plan, []*chunk{k}, isHome, int64(len(p))) }
	if failed || !c.inBackground(fill) {
		fill()
	}
	c.around.Spent(int64(len(p)), time.Since(began))
	return n, failed
}

// planAround plans the copy of k for a reader that waits for n bytes. plan is nil if it is not worth it or home is to
// be tried.
func (f *File) planAround(ctx context.Context, k *chunk, n int64) (plan *deviceCopy, tryHome bool) {
	facts := f.facts(ctx, k.pages)
	best, took := f.fastest(facts, k.pages, n, k.share)
	if best == nil {
		return nil, false // readDeviceOrHome decides
	}
	if f.homesTurn(n, took/time.Duration(k.share)) {
		return nil, true
	}
	f.probe(facts, k.pages, best, time.Now())
	if plan = f.plan(facts, best, k.pages); plan == nil {
		return nil, false
	}
	plan.beUrgent(took)
	k.epoch = plan.epoch
	k.copy.Store(plan.Read)
	return plan, false
}
