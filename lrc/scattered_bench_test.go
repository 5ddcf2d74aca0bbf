package lrc

import (
	"math/rand/v2"
	"testing"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// BenchmarkScattered makes the calls of a device's acquire of 1 GiB after the CPU wrote 1 % of the pages, scattered
// over the file.
func BenchmarkScattered(b *testing.B) {
	const pages = 1 << 18
	gpu := versions.GPU(0)
	whole := []page.Range{{End: pages}}
	var scattered []page.Range
	for p := page.Index(0); p < pages; p += 100 {
		scattered = append(scattered, page.Range{Start: p, End: p + 1})
	}
	var f File
	f.updated(whole, gpu, true)
	var stale []Update
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		for _, rg := range scattered {
			f.BeginWrite(rg).Commit(rg)
		}
		b.StartTimer()
		pending := f.Pending(whole[0], false)
		p := f.BeginAcquire(whole[0], gpu)
		stale = p.AppendUpdates(stale[:0], whole[0])
		if len(pending) > 0 || len(stale) != len(scattered) {
			b.Fatal("another number of pages is stale")
		}
		p.Updated(scattered, true)
		p.End()
		e := f.BeginExpose(whole[0], gpu)
		if len(e.Untracked) > 0 {
			b.Fatal("pages are not tracked")
		}
		e.Abort()
	}
}

// BenchmarkUnchanged is the same without changes.
func BenchmarkUnchanged(b *testing.B) {
	whole := page.Range{End: 1 << 18}
	var f File
	f.updated([]page.Range{whole}, versions.GPU(0), true)
	b.ReportAllocs()
	for b.Loop() {
		if len(f.Pending(whole, false))+len(f.Stale(whole, versions.GPU(0)))+len(f.untracked(whole,
			versions.GPU(0))) > 0 {
			b.Fatal("something changed")
		}
	}
}

// BenchmarkFragmented is BenchmarkUnchanged after an acquire of scattered pages, whose states differ from their
// neighbours'.
func BenchmarkFragmented(b *testing.B) {
	whole, gpu := page.Range{End: 1 << 18}, versions.GPU(0)
	var f File
	f.updated([]page.Range{whole}, gpu, true)
	for p := page.Index(0); p < whole.End; p += 100 {
		one := []page.Range{{Start: p, End: p + 1}}
		f.keepBases(one, versions.CPU)
		f.cpuChanged(one[0], one[0])
		f.updated(one, gpu, true)
	}
	b.ReportAllocs()
	for b.Loop() {
		if len(f.Pending(whole, false))+len(f.Stale(whole, gpu))+len(f.untracked(whole, gpu)) > 0 {
			b.Fatal("something changed")
		}
	}
}

// BenchmarkWriteOfOnePage makes the calls of a CPU write of one page, for pages that another write changed last.
func BenchmarkWriteOfOnePage(b *testing.B) {
	const pages = 1 << 14
	gpu, rnd := versions.GPU(0), rand.New(rand.NewPCG(1, 2))
	var f File
	f.updated([]page.Range{{End: pages}}, gpu, true)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if n%(pages/2) == 0 {
			f.updated([]page.Range{{End: pages}}, gpu, true)
		}
		p := page.Index(rnd.IntN(pages))
		rg := page.Range{Start: p, End: p + 1}
		w := f.BeginWrite(rg)
		if len(w.Collect) > 0 || !f.Held(rg) {
			b.Fatal("another state")
		}
		w.Commit(page.Range{})
	}
}
