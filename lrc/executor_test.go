package lrc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// fault is a mistake that an executor makes on purpose.
type fault int

const (
	none fault = iota
	// skippedVersion leaves out the increment of a release.
	skippedVersion
	// forgottenBase does not keep the first bytes that a plan's Keep asks for.
	forgottenBase
	// collectedDraining collects draining pages.
	collectedDraining
	// oldTail does not update the base of a collected page.
	oldTail
	// mergedWords merges by words of 8 bytes.
	mergedWords
	// copiedOver copies over replicas that programs may be storing into.
	copiedOver
	// tornAgreement takes the new base of a collected page from a second read of the device.
	tornAgreement
	// heldAgain lets a release return although the kernel holds one of its pages again.
	heldAgain
	// unwatched does not find stores into memory that home's bytes were never brought to.
	unwatched
)

// edge is the place of the random programs' pages in the file: on both sides of the edge of a segment, and so far from
// the beginning of the file that the pages before must not cost memory or time.
const edge page.Index = 1<<50 - 3

type executorBase struct {
	page page.Index
	base Base
}

type executorPage struct {
	data  []byte
	dirty bool
}

type executorMapping struct {
	pages    page.Range
	writable bool
}

type executorRelease struct {
	pages page.Range
	drain Drain
}

// replicaMemory is a page of device memory, and a stand-in for the digest of its base.
type replicaMemory struct{ data, agreed []byte }

// betweenReadAndAgreement is called while a page of the owner is collected.
type betweenReadAndAgreement struct {
	owner versions.Owner
	page  page.Index
	fn    func()
}

// executor carries out the decisions of a File on byte arrays, as package pagecache does on files and devices.
type executor struct {
	layout   model.Layout
	f        File
	first    page.Index // of the file, where the programs' byte 0 is
	size     int64      // of the file, from first on
	home     map[page.Index][]byte
	kernel   map[page.Index]*executorPage
	devices  []map[page.Index]*replicaMemory
	bases    map[executorBase][]byte
	mappings map[model.Client]executorMapping
	releases map[model.Client]*executorRelease
	overlaps int64
	fault    fault
	// aborts, if not nil, decides which plans are begun and aborted before they are carried out. aborted counts them.
	aborts  *rand.Rand
	aborted int
	between betweenReadAndAgreement
	// log, if not nil, gets every decision of the File.
	log *strings.Builder
	err error
	// read is the result of the last step.
	read []byte
}

func newExecutor(l model.Layout, plant fault) *executor { return newExecutorAt(edge, l, plant) }

func newExecutorAt(first page.Index, l model.Layout, plant fault) *executor {
	x := &executor{
		layout: l, first: first, size: l.Size, fault: plant,
		home:     make(map[page.Index][]byte),
		kernel:   make(map[page.Index]*executorPage),
		bases:    make(map[executorBase][]byte),
		mappings: make(map[model.Client]executorMapping),
		releases: make(map[model.Client]*executorRelease),
	}
	x.f.HeldUnasked = l.WriteBack
	for p := range page.Index(l.Pages) {
		x.home[x.first+p] = make([]byte, page.Size)
	}
	for range l.Devices {
		x.devices = append(x.devices, make(map[page.Index]*replicaMemory))
	}
	return x
}

func (x *executor) logf(format string, args ...any) {
	if x.log != nil {
		fmt.Fprintf(x.log, "  "+format+"\n", args...)
	}
}

func (x *executor) failf(format string, args ...any) {
	if x.err == nil {
		x.err = fmt.Errorf(format, args...)
	}
}

// Between is model.Interleaver's.
func (x *executor) Between(device, p int, fn func()) {
	x.between = betweenReadAndAgreement{versions.GPU(device), x.first + page.Index(p), fn}
}

// Home, Kernel, Replica and Overlaps are model.Inspector's.
func (x *executor) Home() ([]byte, error) {
	var b []byte
	for p := range page.Index(x.layout.Pages) {
		b = append(b, x.home[x.first+p]...)
	}
	return b[:x.size], nil
}

func (x *executor) Kernel(p int) []byte {
	if k := x.kernel[x.first+page.Index(p)]; k != nil {
		return k.data[:x.valid(x.first+page.Index(p))]
	}
	return nil
}

func (x *executor) Replica(d, p int) []byte {
	if m := x.devices[d][x.first+page.Index(p)]; m != nil {
		return m.data[:x.valid(x.first+page.Index(p))]
	}
	return nil
}

func (x *executor) Overlaps() int64 { return x.overlaps }

// valid is the number of bytes of page p before end of file.
func (x *executor) valid(p page.Index) int {
	return int(min(max(x.size-(p-x.first).Offset(), 0), page.Size))
}

func (x *executor) all() page.Range {
	return page.Range{Start: x.first, End: x.first + page.Index(x.layout.Pages)}
}

// covering returns the pages of the file's window that n bytes at off take.
func (x *executor) covering(off, n int64) page.Range {
	rg := page.Covering(off, n)
	return page.Range{Start: x.first + rg.Start, End: x.first + rg.End}
}

// each calls fn for the part [from, to) of every page that n bytes at off touch; at counts from off.
func (x *executor) each(off, n int64, fn func(p page.Index, from, to, at int64)) {
	for at := int64(0); at < n; {
		from := (off + at) % page.Size
		to := min(page.Size, from+n-at)
		fn(x.first+page.Index((off+at)/page.Size), from, to, at)
		at += to - from
	}
}

// base returns base b of page p, nil if it was not kept.
func (x *executor) base(p page.Index, b Base) []byte {
	if b == BaseZero {
		return make([]byte, page.Size)
	}
	return x.bases[executorBase{p, b}]
}

func (x *executor) putBase(k executorBase, b []byte) {
	if x.bases[k] != nil {
		x.failf("base %d of page %d is made while there is one", k.base, k.page)
	}
	x.bases[k] = bytes.Clone(b)
}

func (x *executor) dropBases(drop []PageBase) {
	for _, d := range drop {
		x.logf("drop base %d of %v", d.Base, d.Range)
		for p := d.Range.Start; p < d.Range.End; p++ {
			k := executorBase{p, d.Base}
			if x.bases[k] == nil && x.fault != forgottenBase && x.fault != oldTail {
				x.failf("base %d of page %d is dropped and there is none", d.Base, p)
			}
			delete(x.bases, k)
		}
	}
}

// keep keeps home's bytes as the bases that a plan asks for.
func (x *executor) keep(bases []PageBase) {
	for _, k := range bases {
		x.logf("keep home of %v as base %d", k.Range, k.Base)
		for p := k.Range.Start; p < k.Range.End; p++ {
			if x.fault != forgottenBase {
				x.putBase(executorBase{p, k.Base}, x.home[p])
			}
		}
	}
}

func (x *executor) collect(rg page.Range, entering bool) {
	for {
		pending := x.f.Pending(rg, entering || x.fault == collectedDraining)
		if len(pending) == 0 {
			return
		}
		for _, c := range pending {
			for p := c.Range.Start; p < c.Range.End; p++ {
				x.collectPage(p, c)
			}
		}
	}
}

func (x *executor) collectPage(p page.Index, c Pending) {
	m := x.devices[c.Owner.Ordinal()][p]
	mine := bytes.Clone(m.data)
	if b := &x.between; b.fn != nil && b.owner == c.Owner && b.page == p {
		b.fn()
		b.fn = nil
	}
	one := page.Range{Start: p, End: p + 1}
	c.Range = one
	x.abortCollect([]Pending{c})
	plan := x.f.BeginCollect([]Pending{c})
	x.keep(plan.Keep)
	merged := bytes.Clone(mine)
	agrees := true
	if c.Base != BaseHome {
		base := x.base(p, c.Base)
		if base == nil {
			if x.fault != forgottenBase {
				x.failf("%v of page %d is collected without its base %d", c.Owner, p, c.Base)
			}
			base = x.home[p]
		}
		n := x.valid(p)
		if x.fault == mergedWords {
			x.overlaps += int64(Merge3(bytes.Clone(mine)[:n], base[:n], mine[:n], x.home[p][:n]))
			mergeWordwise(merged, base, mine, x.home[p])
		} else {
			overlaps := int64(Merge3(merged[:n], base[:n], mine[:n], x.home[p][:n]))
			if c.Base != BaseZero {
				x.overlaps += overlaps
			}
		}
		agrees = bytes.Equal(merged, mine)
	}
	x.logf("collect page %d of %v, base %v, agrees %v", p, c.Owner, c.Base, agrees)
	copy(x.home[p], merged[:x.valid(p)])
	if x.fault == oldTail {
		plan.Abort()
		x.f.pages.update([]page.Range{one}, nil, unremembered, func(s *state) {
			s.home = s.home.With(c.Owner, s.find(c.Owner).v.Get(c.Owner))
		})
		return
	}
	if x.fault == tornAgreement {
		mine = bytes.Clone(m.data)
	}
	m.agreed = mine
	done := [2][]page.Range{}
	if agrees {
		done[0] = []page.Range{one}
	} else {
		done[1] = []page.Range{one}
	}
	keep, drop := plan.Commit(done[0], done[1])
	for _, k := range keep {
		x.logf("keep the collected bytes of %v as base %d", k.Range, k.Base)
		x.putBase(executorBase{p, k.Base}, mine)
	}
	x.dropBases(drop)
}

// mergeWordwise is the thesis's merge: a word is the device's if any of its bytes is.
func mergeWordwise(dst, base, mine, theirs []byte) {
	for i := 0; i+8 <= len(dst); i += 8 {
		if bytes.Equal(mine[i:i+8], base[i:i+8]) {
			copy(dst[i:i+8], theirs[i:i+8])
		} else {
			copy(dst[i:i+8], mine[i:i+8])
		}
	}
}

// changeHome is a write request. Afterwards the kernel holds the pages of held.
func (x *executor) changeHome(off int64, data []byte, held page.Range) {
	rg := x.covering(off, int64(len(data)))
	x.collect(rg, false)
	if end := off + int64(len(data)); end > x.size {
		x.moveEnd(x.size, end)
	}
	x.abortWrite(rg)
	plan := x.f.BeginWrite(rg)
	x.keep(plan.Keep)
	if end := off + int64(len(data)); end > x.size {
		x.zeroReplicas(x.size, end)
		x.size = end
	}
	x.each(off, int64(len(data)), func(p page.Index, from, to, at int64) { copy(x.home[p][from:to], data[at:]) })
	x.logf("home of %v written by the CPU", rg)
	plan.Commit(held)
}

// zeroReplicas zeroes the bytes [from, to) of every replica and of its base.
func (x *executor) zeroReplicas(from, to int64) {
	x.each(from, to-from, func(p page.Index, lo, hi, _ int64) {
		for d, memory := range x.devices {
			m := memory[p]
			if m == nil {
				continue
			}
			clear(m.data[lo:hi])
			if b, tracked := x.f.BaseOf(p, versions.GPU(d)); tracked {
				clear(m.agreed[lo:hi])
				if base := x.bases[executorBase{p, b}]; b != BaseHome && base != nil {
					clear(base[lo:hi])
				}
			}
		}
	})
}

// modified returns the pages of rg whose programs changed them. Bytes past end of file do not count.
func (x *executor) modified(rg page.Range, device int) (out []page.Range) {
	for _, run := range x.f.Tracked(rg, versions.GPU(device)) {
		for p := run.Start; p < run.End; p++ {
			m := x.devices[device][p]
			if n := x.valid(p); !bytes.Equal(m.data[:n], m.agreed[:n]) {
				out = page.AppendRange(out, page.Range{Start: p, End: p + 1})
			}
		}
	}
	return out
}
