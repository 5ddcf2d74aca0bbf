//go:build invariants

package lrc

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TestMisuse: all misuse that the package comment lists panics.
func TestMisuse(t *testing.T) {
	gpu0, gpu1 := versions.GPU(0), versions.GPU(1)
	rg := func(start, end page.Index) page.Range { return page.Range{Start: start, End: end} }
	one := func(start, end page.Index) []page.Range { return []page.Range{rg(start, end)} }
	release := func(f *File, r page.Range) {
		if d := f.BeginRelease([]page.Range{r}, r, gpu0).Commit(); len(d.Pages) > 0 {
			d.Dropped()
		}
	}
	for _, c := range []struct {
		name, says string
		misuse     func(f *File)
	}{
		{"a write begins over another", "while a plan to write", func(f *File) {
			f.BeginWrite(rg(0, 2))
			f.BeginWrite(rg(1, 3))
		}},
		{"a collect begins over a write", "while a plan to write", func(f *File) {
			f.BeginRelease(one(0, 1), rg(0, 1), gpu0).Commit() // it drains
			f.BeginWrite(rg(0, 1))
			f.BeginCollect(f.Pending(rg(0, 1), true))
		}},
		{"a write begins over a collect", "while a plan to collect", func(f *File) {
			release(f, rg(0, 2))
			f.BeginCollect(f.Pending(rg(0, 1), false))
			f.plans.begin(writing, versions.CPU, one(0, 2))
		}},
		{"a write begins over an acquire", "while a plan to acquire", func(f *File) {
			f.BeginAcquire(rg(0, 2), gpu1)
			f.BeginWrite(rg(0, 1))
		}},
		{"an acquire is widened over a write", "while a plan to write", func(f *File) {
			p := f.BeginAcquire(rg(0, 2), gpu1)
			f.BeginWrite(rg(2, 3))
			p.Widen(rg(0, 3))
		}},
		{"a comparison begins over an exposure", "while a plan to expose", func(f *File) {
			f.BeginExpose(rg(0, 2), gpu0)
			f.BeginCompare(rg(0, 9))
		}},
		{"a truncation begins over a write", "while a plan to write", func(f *File) {
			f.BeginWrite(rg(3, 4))
			f.BeginTruncate(1)
		}},
		{"a release is committed under a write", "while a plan to write", func(f *File) {
			p := f.BeginRelease(one(0, 1), rg(0, 1), gpu0)
			f.BeginWrite(rg(0, 1))
			p.Commit()
		}},
		{"an eviction is committed under a write", "while a plan to write", func(f *File) {
			p := f.BeginEvict(rg(0, 4), gpu0)
			f.BeginWrite(rg(0, 1))
			p.Commit()
		}},
		{"stores end under a write", "while a plan to write", func(f *File) {
			f.BeginWrite(rg(0, 1))
			f.Untrack(rg(0, 4), gpu0)
		}},
		{"memory is new under a write", "while a plan to write", func(f *File) {
			f.BeginWrite(rg(0, 1))
			f.Hollow(rg(0, 4), gpu1)
		}},
		{"a write is committed twice", "has ended", func(f *File) {
			p := f.BeginWrite(rg(0, 1))
			p.Commit(rg(0, 0))
			p.Commit(rg(0, 0))
		}},
		{"a write is aborted after its commit", "has ended", func(f *File) {
			p := f.BeginWrite(rg(0, 1))
			p.Commit(rg(0, 0))
			p.Abort()
		}},
		{"an acquire is reported after its end", "has ended", func(f *File) {
			p := f.BeginAcquire(rg(0, 1), gpu1)
			p.End()
			p.Updated(one(0, 1), true)
		}},
		{"pages are dropped twice", "has ended", func(f *File) {
			d := f.BeginRelease(one(0, 1), rg(0, 1), gpu0).Commit()
			d.Dropped()
			d.Dropped()
		}},
		{"a release is committed after its abort", "has ended", func(f *File) {
			p := f.BeginRelease(one(0, 1), rg(0, 1), gpu0)
			p.Abort()
			p.Commit()
		}},
		{"a collect is committed for other pages", "does not cover", func(f *File) {
			release(f, rg(0, 1))
			f.BeginCollect(f.Pending(rg(0, 1), false)).Commit(one(0, 2), nil)
		}},
		{"a collect is committed out of order", "out of order", func(f *File) {
			release(f, rg(0, 2))
			f.BeginCollect(f.Pending(rg(0, 2), false)).Commit([]page.Range{rg(1, 2), rg(0, 1)}, nil)
		}},
		{"an acquire is reported for other pages", "does not cover", func(f *File) {
			f.BeginAcquire(rg(0, 1), gpu1).Updated(one(0, 2), false)
		}},
		{"a release is committed for other pages", "does not cover", func(f *File) {
			f.BeginRelease(one(0, 2), rg(0, 1), gpu0).Commit()
		}},
		{"a comparison is committed for other pages", "does not cover", func(f *File) {
			f.BeginCompare(rg(0, 1)).Commit(one(0, 2))
		}},
		{"an acquire is reported after a loss", "were lost", func(f *File) {
			p := f.BeginAcquire(rg(0, 4), gpu1)
			lost := f.BeginEvict(rg(3, 4), gpu1)
			lost.Lossy = true
			lost.Commit()
			p.Updated(one(0, 1), false)
		}},
		{"an acquire begins while something is pending", "is collected", func(f *File) {
			release(f, rg(0, 1))
			f.BeginAcquire(rg(0, 1), gpu1)
		}},
		{"what is pending is evicted", "is collected", func(f *File) {
			release(f, rg(0, 1))
			f.BeginEvict(rg(0, 1), gpu0).Commit()
		}},
		{"a collect begins of what is not pending", "to be collected next", func(f *File) {
			f.BeginCollect([]Pending{{rg(0, 1), gpu0, BaseHome}})
		}},
		{"a collect begins of two owners", "cannot be collected together", func(f *File) {
			release(f, rg(0, 1))
			f.BeginCollect(append(f.Pending(rg(0, 1), false), Pending{rg(1, 2), gpu1, BaseHome}))
		}},
		{"what was up to date is reported", "was up to date", func(f *File) {
			f.BeginAcquire(rg(0, 1), gpu0).Updated(one(0, 1), true)
		}},
		{"what is tracked is exposed", "cannot be tracked", func(f *File) {
			f.BeginExpose(rg(0, 1), gpu0).Commit(one(0, 1))
		}},
		{"a plan stays open", "neither committed nor aborted", func(f *File) {
			f.BeginExpose(rg(0, 1), gpu0)
			f.CheckEnded()
		}},
		{"a plan that has something to collect is committed", "", func(f *File) {
			release(f, rg(0, 1))
			f.BeginWrite(rg(0, 1)).Commit(rg(0, 0))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var f File
			p := f.BeginAcquire(rg(0, 4), gpu0)
			p.Updated(one(0, 4), true)
			p.End()
			f.CheckEnded()
			defer func() {
				r := recover()
				require.NotNil(t, r, "it does not panic")
				require.Contains(t, fmt.Sprint(r), c.says)
			}()
			c.misuse(&f)
		})
	}
}

// TestPlansBesideEachOther: concurrent plans that the package comment allows are legal.
func TestPlansBesideEachOther(t *testing.T) {
	gpu0, gpu1 := versions.GPU(0), versions.GPU(1)
	rg := func(start, end page.Index) page.Range { return page.Range{Start: start, End: end} }
	var f File
	for _, o := range []versions.Owner{gpu0, gpu1} {
		p := f.BeginAcquire(rg(0, 4), o)
		p.Updated([]page.Range{rg(0, 4)}, true)
		p.End()
	}
	// Writes of different pages that end out of order, while one release drains and another is under way.
	drain := f.BeginRelease([]page.Range{rg(3, 4)}, rg(3, 4), gpu0).Commit()
	release := f.BeginRelease([]page.Range{rg(2, 3)}, rg(2, 3), gpu1)
	a, b := f.BeginWrite(rg(0, 1)), f.BeginWrite(rg(1, 2))
	c := f.BeginWrite(rg(3, 4)) // the kernel's write of a page that drains
	b.Commit(rg(0, 0))
	d := f.BeginWrite(rg(1, 2))
	a.Abort()
	c.Commit(rg(0, 0))
	d.Commit(rg(0, 0))
	again := release.Commit()
	require.Empty(t, drain.Dropped().Pages)
	again.GiveUp()
	// Two collects of an owner and of another one, and an eviction that waits for one.
	pending := f.Pending(rg(0, 4), false)
	require.Len(t, pending, 2)
	evict := f.BeginEvict(rg(3, 4), gpu0)
	x, y := f.BeginCollect(pending[:1]), f.BeginCollect(pending[1:])
	y.Commit(nil, []page.Range{pending[1].Range})
	x.Abort()
	evict.Commit()
	f.CheckEnded()
}
