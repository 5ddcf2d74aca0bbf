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

// The kernel sends what programs stored into a mapped file in as many requests as there are runs of dirty pages,
// hundreds of them at once. So writes of different pages go on beside each other, and wait for nobody but the
// filesystem that home is on. This is for writes that change nothing else: inside the file, of pages of which nothing
// is pending. Others take File.mu as everybody does.
//
// A write beside others holds File.mu read-locked from before it asks for the bases until they are kept and the pages'
// states say that home changed. So whoever has File.mu locked sees every write as done or as not begun, with its bases.
// What two of them must not do at once is done under writes.mu, in two short steps; between these home is read and
// written. A write has its pages for itself: one that finds a page taken waits for File.mu instead. So each base is
// what home had before the first write of which the device does not know, and of two writes of one page the second
// finds the base kept.

// writes are those that go on beside each other. What File.mu protects is changed by them with mu locked.
type writes struct {
	mu sync.Mutex
	// under has the pages of each, of which no two overlap. Protected by mu.
	under []page.Range
}

// writeBeside is ChangeHome of a write that can go on beside others; for another, it returns false and has done
// nothing.
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
	if f.home.Noticed() != f.changes || f.doubtfulLocked(rg) {
		return false, nil
	}
	plan, k, ok := f.beginWrite(rg, end)
	if !ok {
		return false, nil
	}
	inside, err := k.readInside(f, rg, end)
	changed := err == nil && inside
	if changed {
		f.clean.Changed(rg) // no read without mu from now on; Commit says it again
		err = do(c.Off, c.Len)
	}
	f.endWrite(c, rg, plan, k, changed)
	if beside := (*changedBeside)(nil); !changed && errors.As(err, &beside) {
		return false, nil
	}
	return inside || err != nil, err
}

// readInside reads what is to be kept before a write of rg that ends at end, and reports whether that is inside the
// file: a program may have cut it in SOURCE directly.
func (k *keeping) readInside(f *File, rg page.Range, end int64) (inside bool, err error) {
	if len(k.parts) == 1 && rg.Len() == 1 {
		err = k.read(f) // tells how much of the page home has
		return k.seen >= end, err
	}
	before, err := f.home.Signature()
	if err != nil || end > before.Size {
		return false, err
	}
	return true, k.read(f)
}

// beginWrite takes the pages of rg for a write that ends at end. It returns false where the write cannot go on beside
// others.
func (f *File) beginWrite(rg page.Range, end int64) (plan lrc.WritePlan, k keeping, ok bool) {
	w := &f.writes
	w.mu.Lock()
	defer w.mu.Unlock()
	if !f.c.memory.fits(rg.Bytes()) {
		if pages, _ := f.keepsLocked(rg, versions.CPU, 1); pages > 0 {
			return plan, k, false
		}
	}
	if end > f.size || f.flights.overlap(rg) || slices.ContainsFunc(w.under, rg.Overlaps) {
		return plan, k, false
	}
	if plan = f.lrc.BeginWrite(rg); len(plan.Collect) > 0 {
		return plan, k, false
	}
	w.under = append(w.under, rg)
	return plan, f.newKeepingLocked(plan.Keep), true
}

// endWrite gives the pages of a write back. changed says that home may have been changed, if only a part of it;
// otherwise it was not.
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
