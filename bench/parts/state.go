package parts

import (
	"math/rand/v2"
	"runtime"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// Memory is the memory of a file's coherence state, per page of the file.
type Memory struct {
	// Accounted is what the state itself reports. Heap is how much Go's heap grew.
	Accounted, Heap float64
}

// Agreeing measures a file of n pages. All devices hold every page, writable and up to date.
func Agreeing(n page.Index, devices int) Memory {
	return weigh(n, func(f *lrc.File) {
		for d := range devices {
			acquire(f, page.Range{End: n}, versions.GPU(d))
		}
	})
}

// Disagreeing measures a file of n pages that all devices hold, writable. Neighbouring pages differ in everything: who
// released how often, whose releases are home, who is stale, whose base was kept.
func Disagreeing(n page.Index, devices int) Memory {
	return weigh(n, func(f *lrc.File) {
		rnd := rand.New(rand.NewPCG(5, 6))
		for d := range devices {
			acquire(f, page.Range{End: n}, versions.GPU(d))
		}
		for p := range n {
			scramble(f, page.Range{Start: p, End: p + 1}, devices, rnd)
		}
	})
}

// acquire brings all of rg to a device, where programs store into it.
func acquire(f *lrc.File, rg page.Range, o versions.Owner) {
	plan := f.BeginAcquire(rg, o)
	for _, u := range plan.Updates() {
		plan.Updated([]page.Range{u.Range}, true)
	}
	plan.End()
}

// scramble makes the devices and the CPU change the page in a random order and number, by the rules of lrc. So it
// produces only states that can occur.
func scramble(f *lrc.File, rg page.Range, devices int, rnd *rand.Rand) {
	release := func(o versions.Owner) {
		if drain := f.BeginRelease([]page.Range{rg}, rg, o).Commit(); len(drain.Pages) > 0 {
			drain.GiveUp()
		}
	}
	collectNext := func(pending []lrc.Pending, agrees bool) {
		plan := f.BeginCollect(pending[:1])
		if agrees {
			plan.Commit([]page.Range{rg}, nil)
		} else {
			plan.Commit(nil, []page.Range{rg})
		}
	}
	collect := func() {
		for pending := f.Pending(rg, false); len(pending) > 0; pending = f.Pending(rg, false) {
			collectNext(pending, pending[0].Base == lrc.BaseHome)
		}
	}
	for range 2 * devices {
		o := versions.GPU(rnd.IntN(devices))
		switch rnd.IntN(4) {
		case 0: // released bytes go home before a write
			collect()
			f.BeginWrite(rg).Commit(rg)
		case 1:
			release(o)
		case 2:
			collect()
		case 3:
			if len(f.Pending(rg, false)) == 0 {
				acquire(f, rg, o)
			}
		}
	}
	// In the end, all devices have released, and a part of that is home: the longest state.
	for _, d := range rnd.Perm(devices) {
		release(versions.GPU(d))
	}
	for range rnd.IntN(devices) {
		if pending := f.Pending(rg, false); len(pending) > 0 {
			collectNext(pending, false)
		}
	}
}

// weigh measures the state that fill makes.
func weigh(n page.Index, fill func(f *lrc.File)) Memory {
	before := heap()
	f := new(lrc.File)
	fill(f)
	after := heap()
	m := Memory{Accounted: float64(f.Memory()) / float64(n), Heap: (float64(after) - float64(before)) / float64(n)}
	runtime.KeepAlive(f)
	return m
}

// heap returns the bytes in live objects.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // the first GC leaves what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
