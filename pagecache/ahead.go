package pagecache

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
)

// aheadChunks is the most chunks that are read ahead by one copy, so that programs that wait are not kept for long.
const aheadChunks = 4

// fetchesMoreFrom reports whether CPU reads bring more from d than what they are for, around it and ahead of it. Without engines
// that would take a processor that programs may need.
func (c *Cache) fetchesMoreFrom(d *device) bool {
	return c.deviceReads == DeviceReadsAlways || d.info.CopyEngines
}

// expect tells the predictor of a read and returns what is expected to be read next.
func (f *File) expect(rg page.Range, size int64) []page.Range {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	f.clean.prepareLocked(size)
	return f.clean.streams.Access(rg, prefetch.Unknown, nil)
}

// readAhead brings what is expected to be read from devices, where they are faster than the disk. Nobody waits.
func (f *File) readAhead(ctx context.Context, ahead []page.Range, home HomeReader) {
	c := f.c
	if len(ahead) > 0 {
		c.ageChunks()
	}
	for _, rg := range ahead {
		if rg.Len() >= chunkPages {
			rg.End = (rg.End + chunkPages - 1) &^ (chunkPages - 1) // the rest of the last one will be next
		}
		first, last := int64(rg.Start>>chunkShift), int64((rg.End-1)>>chunkShift)
		for i := first; i <= last; {
			if c.fullOfChunks() {
				return // the store has not made room yet
			}
			chunks := f.newCleanChunks(rg, i, home)
			if len(chunks) == 0 {
				i++
				continue
			}
			i = chunks[len(chunks)-1].index + 1
			f.fetchChunks(ctx, chunks)
		}
	}
}

// newCleanChunks makes consecutive chunks of pages of rg, from chunk i on, that are neither there nor in the host's page cache.
func (f *File) newCleanChunks(rg page.Range, i int64, home HomeReader) (chunks []*cleanChunk) {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	rg.End = min(rg.End, f.clean.end)
	for ; len(chunks) < aheadChunks && !f.clean.closed; i++ {
		first := page.Index(i << chunkShift)
		pages := rg.Intersect(page.Range{Start: first, End: first + chunkPages})
		if f.clean.chunks[i] != nil || pages.Empty() {
			break
		}
		if f.c.deviceReads != DeviceReadsAlways && home.Cached(pages.Offset(), pages.Bytes()) {
			break
		}
		chunks = append(chunks, f.addChunkLocked(i, pages))
	}
	return chunks
}

// fetchChunks brings chunks that follow each other from a device, or gives them up.
func (f *File) fetchChunks(ctx context.Context, chunks []*cleanChunk) {
	c := f.c
	rg := page.Range{Start: chunks[0].pages.Start, End: chunks[len(chunks)-1].pages.End}
	if f.mu.LockIn(ctx) != nil {
		fillChunks(chunks, nil)
		return
	}
	plan := f.planAheadLocked(rg)
	if plan != nil {
		for _, k := range chunks {
			k.epoch = f.epoch(k.pages)
			k.copy.Store(plan.Read)
		}
	}
	f.mu.Unlock()
	if plan == nil || !plan.Start() {
		fillChunks(chunks, nil)
		return
	}
	fill := func() {
		<-plan.Done()
		f.arrived(plan, chunks, f.isHome(plan), 0)
	}
	if !c.inBackground(fill) {
		fill() // Close waits for copies
	}
}

// arrived fills chunks from a copy that has ended, of which somebody waits for so many bytes, or gives them up where it is not known
// to be what home has.
func (f *File) arrived(plan *deviceCopyPlan, chunks []*cleanChunk, isHome bool, asked int64) {
	defer plan.Finish()
	if !isHome {
		fillChunks(chunks, nil)
		return
	}
	fillChunks(chunks, plan)
	f.count(func(c *Counters) { c.AheadBytes.Add(plan.pages.Bytes() - asked) })
}

// isHome reports whether a copy that has ended is known to be what home has.
func (f *File) isHome(plan *deviceCopyPlan) bool { return plan.Err() == nil && f.verify(plan).Empty() }

// fillChunks fills chunks from what plan copied; nil: gives them up.
func fillChunks(chunks []*cleanChunk, plan *deviceCopyPlan) {
	for _, k := range chunks {
		if plan == nil {
			k.fill(nil)
			continue
		}
		at := (k.pages.Start - plan.pages.Start).Offset()
		k.fill(plan.Buf()[at : at+k.pages.Bytes()])
	}
}

// planAheadLocked decides from which device the pages of rg are read ahead; nil: from none.
func (f *File) planAheadLocked(rg page.Range) *deviceCopyPlan {
	best, haves, _ := f.fastestLocked(rg, rg.Bytes())
	if best == nil {
		f.probeLocked(rg, haves, nil)
		return nil
	}
	f.probeLocked(rg, haves, best.h)
	return f.copyLocked(*best, rg)
}

// fastestLocked returns the device from which all pages of rg, of which somebody waits for n bytes, are thought to be there first,
// and how long that takes; nil if none is faster than the disk is with the n bytes, or it would take much longer than they alone. haves
// is what devices have.
func (f *File) fastestLocked(rg page.Range, n int64) (best *have, haves []have, took time.Duration) {
	if f.detached.Load() || rg.End > page.Count(f.size) {
		return nil, nil, 0
	}
	haves = f.havesLocked(rg)
	disk := f.c.disk.Now()
	took = disk.Time(n)
	always := f.c.deviceReads == DeviceReadsAlways
	for i := range haves {
		x := &haves[i]
		s := x.h.dev.moves.Cost.Now()
		if x.pages[0] != rg || s.Stuck() || !f.c.fetchesMoreFrom(x.h.dev) {
			continue
		}
		all := s.Time(rg.Bytes())
		if all < took && all <= aroundTimes*s.Time(n) || best == nil && always {
			best, took = x, all
		}
	}
	return best, haves, took
}
