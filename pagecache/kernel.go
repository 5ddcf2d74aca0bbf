package pagecache

import (
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// cpu is the view that package kernel has of a File.
type cpu struct{ f *File }

// Draining implements kernel.Executor.
func (e cpu) Draining(rg page.Range) []lrc.DrainID { return e.f.lrc.Draining(rg) }

// CPUReadMerged implements kernel.Executor.
func (e cpu) CPUReadMerged(rg page.Range) lrc.Drain { return e.f.lrc.CPUReadMerged(rg) }

// Size implements kernel.Executor.
func (e cpu) Size() int64 { return e.f.home.Size() }

// Dropped implements kernel.Executor.
func (e cpu) Dropped(calls int, took time.Duration) {
	e.f.count(func(c *Counters) { c.Invalidations.Add(int64(calls)) })
	e.f.c.counters.InvalidateTime.Observe(took)
}

// NotDropped implements kernel.Executor.
func (e cpu) NotDropped(pages page.Range, err error) {
	e.f.c.log.Error("the kernel did not drop its pages of a release", "file", e.f.Name(), "pages", pages.String(),
		"error", err)
}

// Outrun implements kernel.Executor.
func (e cpu) Outrun() {
	e.f.c.log.Warn("programs keep writing the pages that a release makes the kernel drop", "file", e.f.Name())
}
