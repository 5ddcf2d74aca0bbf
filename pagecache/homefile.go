package pagecache

import (
	"context"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Reads of home for a device may run without File.mu (mover.Reads). The disk then works while CPU requests are served.
// holding.reads has these reads, protected by File.mu.

// enterReadsLocked lets reads for the device of h continue when File.mu is unlocked, until leave is called with File.mu
// held.
func (f *File) enterReadsLocked(h *holding) (leave func()) {
	h.reads.Enter()
	return h.reads.Leave
}

// enterReads is enterReadsLocked for callers that do not hold File.mu.
func (f *File) enterReads(ctx context.Context, h *holding) (leave func(), err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	leaveLocked := f.enterReadsLocked(h)
	return func() { f.whenFree(ctx, leaveLocked) }, nil
}

// spoilLocked reports to devices' reads, to views and to locked pages that home changed in rg. It is called after the
// change, because fills of views read home, and take further pages, without File.mu.
func (f *File) spoilLocked(rg page.Range) {
	f.spoilHomeLocked()
	for _, h := range f.holdings {
		h.reads.Spoil(rg)
	}
	f.views.spoil(rg)
}
