package pagecache

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// The kernel writes back a mapped file with one request for each run of dirty pages, hundreds at once. So writes of
// different pages run concurrently, and wait only for the filesystem that home is on. This is for writes that change
// nothing else: they are inside the file and no byte of their pages is pending. Other writes lock File.mu.
//
// A concurrent write holds File.mu read-locked from before it asks for the bases until they are kept and the states of
// the pages say that home changed. So a holder of the write lock sees each such write as done, with its bases, or as
// not begun. The steps that must not overlap run under writes.mu: two short ones, with the read and the write of home
// between them. A write has its pages to itself: one that finds a page taken locks File.mu instead. So each base has
// home's bytes from before the first write that the device does not know of, and the second of two writes of a page
// finds the base kept.

// writes are the concurrent writes. They change what File.mu protects with mu locked.
type writes struct {
	mu sync.Mutex
	// under has the pages of each write. They do not overlap. Protected by mu.
	under []page.Range
}

// writeBeside is ChangeHome for a write that can run concurrently with others. If the write cannot, writeBeside returns
// false and has done nothing.
func (f *File) writeBeside(ctx context.Context, c Change, do func(off, n int64) error) (done bool, err error) {
	if err := f.mu.RLockIn(ctx); err != nil {
		return true, err
	}
	defer f.mu.RUnlock()
	if f.detached.Load() {
		return true, ErrDetached
	}
	written := page.Span(c.Off, c.Len)
	rg, end := written.Pages(), written.End
	if f.home.Noticed() != f.home.LookedAt() || f.doubtfulLocked(rg) || f.kernel.HasMerged() {
		return false, nil
	}
	plan, k, ok := f.beginWrite(rg, end)
	if !ok {
		return false, nil
	}
	inside, err := k.readInside(f, rg, end)
	changed := err == nil && inside
	if changed {
		f.clean.Changed(rg) // ends reads without mu; Commit says it again
		err = do(c.Off, c.Len)
	}
	f.endWrite(c, rg, plan, k, changed)
	if beside := (*changedBeside)(nil); !changed && errors.As(err, &beside) {
		return false, nil
	}
	return inside || err != nil, err
}

// readInside reads the bytes to keep before a write of rg that ends at end. It reports whether the write is inside the
// file, which may have been cut in SOURCE directly.
func (k *keeping) readInside(f *File, rg page.Range, end int64) (inside bool, err error) {
	if len(k.parts) == 1 && rg.Len() == 1 {
		err = k.read(f) // tells how many bytes of the page home has
		return k.seen >= end, err
	}
	before, err := f.home.Signature()
	if err != nil || end > before.Size {
		return false, err
	}
	return true, k.read(f)
}

// beginWrite takes the pages of rg for a write that ends at end. It returns false if the write cannot run concurrently.
func (f *File) beginWrite(rg page.Range, end int64) (plan lrc.WritePlan, k keeping, ok bool) {
	w := &f.writes
	w.mu.Lock()
	defer w.mu.Unlock()
	if !f.c.memory.fits(rg.Bytes()) {
		if pages, _ := f.keepsLocked(rg, versions.CPU, 1); pages > 0 {
			return plan, k, false
		}
	}
	if end > f.home.Size() || f.flights.overlap(rg) || slices.ContainsFunc(w.under, rg.Overlaps) {
		return plan, k, false
	}
	if plan = f.lrc.BeginWrite(rg); len(plan.Collect) > 0 {
		return plan, k, false
	}
	w.under = append(w.under, rg)
	return plan, f.newKeepingLocked(plan.Keep), true
}

// endWrite gives the pages of a write back. changed says that home may have been changed, perhaps in part; if it is
// false, home was not changed.
func (f *File) endWrite(c Change, rg page.Range, plan lrc.WritePlan, k keeping, changed bool) {
	w := &f.writes
	w.mu.Lock()
	defer w.mu.Unlock()
	if changed {
		f.keepLocked(k)
		f.spoilLocked(rg)
		plan.Commit(c.held())
	} else {
		k.free(f)
		plan.Abort()
	}
	i, last := slices.Index(w.under, rg), len(w.under)-1
	w.under[i] = w.under[last]
	w.under = w.under[:last]
}
