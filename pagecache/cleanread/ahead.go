package cleanread

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
)

// AheadChunks is the most chunks of one read-ahead copy. It keeps waits of programs short.
const AheadChunks = 4

// fetchesMoreFrom reports whether CPU reads from d bring additional pages, around the read and ahead of it. Without
// engines that would take a processor that programs may need.
func (c *Cache) fetchesMoreFrom(d *Device) bool {
	return c.When == Always || d.Engines
}

// expect tells the predictor about a read, and returns the ranges that it expects to be read next.
func (f *File) expect(rg page.Range, size int64) []page.Range {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	f.table.prepareLocked(size)
	return f.table.streams.Access(rg, prefetch.Unknown, nil)
}

// readAhead fetches expected ranges from devices that are faster than the disk. Nobody waits for it.
func (f *File) readAhead(ctx context.Context, ahead []page.Range, home Home) {
	c := f.c
	if len(ahead) > 0 {
		c.ageChunks()
	}
	for _, rg := range ahead {
		if rg.Len() >= ChunkPages {
			rg.End = (rg.End + ChunkPages - 1) &^ (ChunkPages - 1) // the rest of the last chunk will be next
		}
		first, last := int64(rg.Start>>chunkShift), int64((rg.End-1)>>chunkShift)
		for i := first; i <= last; {
			if c.fullOfChunks() {
				return // the store has not made room yet
			}
			chunks := f.newChunks(rg, i, home)
			if len(chunks) == 0 {
				i++
				continue
			}
			i = chunks[len(chunks)-1].index + 1
			f.fetchChunks(ctx, chunks)
		}
	}
}

// newChunks makes consecutive chunks for pages of rg, from chunk i on. It stops at one that exists or is in the host's
// page cache.
func (f *File) newChunks(rg page.Range, i int64, home Home) (chunks []*chunk) {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	rg.End = min(rg.End, f.table.end)
	for ; len(chunks) < AheadChunks && !f.table.closed; i++ {
		first := page.Index(i << chunkShift)
		pages := rg.Intersect(page.Range{Start: first, End: first + ChunkPages})
		if f.table.chunks[i] != nil || pages.Empty() {
			break
		}
		if f.c.When != Always && home.Cached(pages.Offset(), pages.Bytes()) {
			break
		}
		chunks = append(chunks, f.addChunkLocked(i, pages))
	}
	return chunks
}

// fetchChunks fetches consecutive chunks from a device, or gives them up.
func (f *File) fetchChunks(ctx context.Context, chunks []*chunk) {
	c := f.c
	rg := page.Range{Start: chunks[0].pages.Start, End: chunks[len(chunks)-1].pages.End}
	plan := f.planAhead(ctx, rg)
	if plan != nil {
		for _, k := range chunks {
			k.epoch = f.epoch(k.pages)
			k.copy.Store(plan.Read)
		}
		// The epochs of the chunks must be those of the facts.
		if f.epoch(rg) != plan.epoch {
			plan.Drop()
			plan = nil
		}
	}
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

// arrived fills chunks from a copy that has ended, or gives them up if the copy is not known to match home. A reader
// waited for asked bytes of it.
func (f *File) arrived(plan *deviceCopy, chunks []*chunk, isHome bool, asked int64) {
	defer plan.Finish()
	if !isHome {
		fillChunks(chunks, nil)
		return
	}
	fillChunks(chunks, plan)
	f.ex.Count(func(c *Counters) { c.AheadBytes.Add(plan.pages.Bytes() - asked) })
}

// fillChunks fills chunks from the copy of plan. If plan is nil it gives them up.
func fillChunks(chunks []*chunk, plan *deviceCopy) {
	for _, k := range chunks {
		if plan == nil {
			k.fill(nil)
			continue
		}
		at := (k.pages.Start - plan.pages.Start).Offset()
		k.fill(plan.Buf()[at : at+k.pages.Bytes()])
	}
}

// planAhead chooses the device for reading rg ahead, and plans the copy; nil: none.
func (f *File) planAhead(ctx context.Context, rg page.Range) *deviceCopy {
	facts := f.facts(ctx, rg)
	if facts == nil {
		return nil
	}
	best, _ := f.fastest(facts, rg, rg.Bytes(), 1)
	f.probe(facts, rg, best, time.Now())
	if best == nil {
		return nil
	}
	return f.plan(facts, best, rg)
}
