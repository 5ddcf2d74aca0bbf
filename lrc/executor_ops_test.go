package lrc

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// Do carries out a step of a program. The model has found the step legal.
func (x *executor) Do(s model.Step) (out []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r) // a broken invariant; the program is to be shrunk as any other
		}
	}()
	if x.log != nil {
		x.log.WriteString(x.layout.Format(s) + "\n")
	}
	x.read = x.do(s)
	x.f.CheckEnded()
	return x.read, x.err
}

func (x *executor) do(s model.Step) []byte {
	switch s.Op {
	case model.Write:
		x.write(s)
	case model.MapStore:
		x.each(s.Off, s.Len, func(p page.Index, from, to, at int64) {
			k := x.page(p)
			copy(k.data[from:to], s.Bytes()[at:])
			k.dirty = true
		})
	case model.Read:
		return x.readCached(s)
	case model.DirectRead:
		x.flush(s.Off, s.Len, false)
		x.collect(x.covering(s.Off, min(s.Len, x.size-s.Off)), false)
		home, _ := x.Home()
		return home[s.Off:min(s.Off+s.Len, x.size)]
	case model.Fsync:
		x.flush(0, x.size, false)
		x.collect(x.all(), false)
	case model.Truncate:
		x.truncate(s.Off)
	case model.OpenTrunc:
		x.truncate(0)
	case model.Append:
		s.Off = x.size
		x.write(s)
	case model.Punch, model.PunchRest, model.Zero, model.Allocate, model.DirectWrite, model.Copy:
		x.space(s)
	case model.SeekRead, model.CopyOut:
		return x.readHome(s)
	case model.Flush:
		x.flush(s.Off, s.Len, false)
	case model.Reclaim:
		x.each(s.Off, s.Len, func(p page.Index, _, _, _ int64) {
			if k := x.kernel[p]; k != nil && !k.dirty {
				delete(x.kernel, p)
			}
		})
	case model.Map:
		x.mappings[s.Client] = executorMapping{x.covering(s.Off, s.Len), s.Writable}
		if !s.Lazy {
			x.acquire(s)
		}
		x.expose(s)
	case model.Unmap, model.Kill:
		m := x.mappings[s.Client]
		if m.writable {
			x.publish(s.Client, m.pages)
			x.finish(s.Client)
		}
		delete(x.mappings, s.Client)
	case model.Store:
		x.each(s.Off, s.Len, func(p page.Index, from, to, at int64) {
			copy(x.memory(s.Client)[p].data[from:to], s.Bytes()[at:])
		})
	case model.Load:
		var out []byte
		x.each(s.Off, min(s.Len, x.size-s.Off), func(p page.Index, from, to, _ int64) {
			out = append(out, x.memory(s.Client)[p].data[from:to]...)
		})
		return out
	case model.Acquire:
		x.acquire(s)
	case model.Release:
		x.publish(s.Client, x.within(s))
		x.finish(s.Client)
	case model.Publish:
		x.publish(s.Client, x.within(s))
	case model.Drop:
		for _, d := range x.releases[s.Client].drain.Pages {
			x.drop(d.Intersect(x.covering(s.Off, s.Len)))
		}
	case model.Finish:
		x.finish(s.Client)
	case model.DontNeed:
		x.dontNeed(s)
	case model.Evict:
		x.evict(s)
	case model.Collect:
		x.collect(x.all(), false)
	case model.Untrack:
		x.untrack()
	}
	return nil
}

func (x *executor) memory(c model.Client) map[page.Index]*replicaMemory {
	return x.devices[x.layout.Device(c)]
}

func (x *executor) owner(c model.Client) versions.Owner { return versions.GPU(x.layout.Device(c)) }

func (x *executor) within(s model.Step) page.Range {
	return x.covering(s.Off, s.Len).Intersect(x.mappings[s.Client].pages)
}

// page returns the kernel's copy of p, read if need be.
func (x *executor) page(p page.Index) *executorPage {
	if k := x.kernel[p]; k != nil {
		return k
	}
	one := page.Range{Start: p, End: p + 1}
	x.logf("the kernel reads page %d", p)
	x.f.CPURead(one)
	x.collect(one, true)
	x.kernel[p] = &executorPage{data: bytes.Clone(x.home[p])}
	return x.kernel[p]
}

func (x *executor) readCached(s model.Step) (out []byte) {
	x.each(s.Off, min(s.Len, x.size-s.Off), func(p page.Index, from, to, _ int64) {
		out = append(out, x.page(p).data[from:to]...)
	})
	return out
}

func (x *executor) write(s model.Step) {
	data := s.Bytes()
	whole := page.Range{Start: x.first + page.Count(s.Off), End: x.first + page.Index((s.Off+s.Len)>>page.Shift)}
	if !x.layout.WriteBack {
		x.changeHome(s.Off, data, whole)
	}
	grows := s.Off+s.Len > x.size
	x.each(s.Off, s.Len, func(p page.Index, from, to, at int64) {
		if x.kernel[p] == nil && x.layout.WriteBack && to-from < page.Size && x.valid(p) > 0 {
			x.page(p)
		}
		if x.kernel[p] == nil && (whole.Contains(p) || x.layout.WriteBack) {
			x.kernel[p] = &executorPage{data: make([]byte, page.Size)}
		}
		if k := x.kernel[p]; k != nil {
			copy(k.data[from:to], data[at:])
			k.dirty = k.dirty || x.layout.WriteBack
		}
	})
	if x.layout.WriteBack && grows {
		x.zeroReplicas(x.size, s.Off+s.Len)
		x.size = s.Off + s.Len
		x.flush(s.Off, s.Len, false)
	}
}

// flush makes the kernel write its dirty pages of [off, off+n) home and, with drop, forget all of its pages there.
func (x *executor) flush(off, n int64, drop bool) {
	x.each(off, min(n, x.size-off), func(p page.Index, _, _, _ int64) {
		k := x.kernel[p]
		if k == nil {
			return
		}
		if k.dirty {
			k.dirty = false
			held := page.Range{}
			if x.layout.WriteBack {
				held = page.Range{Start: p, End: p + 1}
			}
			x.changeHome((p - x.first).Offset(), k.data[:x.valid(p)], held)
		}
		if drop {
			x.logf("the kernel forgets page %d", p)
			delete(x.kernel, p)
		}
	})
}

func (x *executor) drop(rg page.Range) { x.flush((rg.Start - x.first).Offset(), rg.Bytes(), true) }

func (x *executor) truncate(size int64) {
	if size >= x.size {
		x.moveEnd(x.size, size)
		x.zeroReplicas(x.size, size)
		x.size = size
		return
	}
	x.moveEnd(size, x.size)
	limit := int64(x.layout.Pages) * page.Size
	x.rehearse("a truncation", func() { x.f.BeginTruncate(x.first + page.Count(size)).Abort() })
	plan := x.f.BeginTruncate(x.first + page.Count(size))
	x.each(size, limit-size, func(p page.Index, from, to, _ int64) {
		clear(x.home[p][from:to])
		if k := x.kernel[p]; k != nil {
			clear(k.data[from:to])
			if from == 0 {
				delete(x.kernel, p)
			}
		}
	})
	x.size = size
	x.dropBases(plan.Commit())
	x.zeroReplicas(size, limit)
}

// moveEnd keeps home's bytes of the page that has the old or the new end, before it is zeroed from there on.
func (x *executor) moveEnd(from, to int64) {
	p := x.first + page.Index(from>>page.Shift)
	rg := page.Range{Start: p, End: x.first + page.Count(from)}
	if from == to || rg.Empty() || len(x.f.Keeps([]page.Range{rg}, versions.CPU)) == 0 {
		return
	}
	plan := x.f.BeginCompare(rg)
	x.keep(plan.Commit(plan.Compare))
}

func (x *executor) writers(d int, p page.Index) bool {
	for c, m := range x.mappings {
		if x.layout.Device(c) == d && m.writable && m.pages.Contains(p) {
			return true
		}
	}
	return false
}

// expose brings stale pages on the client's device up to date, or gives them up if no client uses them. It tracks the
// pages that the client may store into.
func (x *executor) expose(s model.Step) {
	o, d := x.owner(s.Client), x.layout.Device(s.Client)
	x.collectOthers(d)
	for _, u := range x.f.Stale(x.all(), o) {
		for p := u.Range.Start; p < u.Range.End; p++ {
			one := page.Range{Start: p, End: p + 1}
			switch {
			case u.Mode == ModeFill, u.Mode == ModePatch && u.Base == BaseZero:
			case u.Mode == ModePatch, x.othersMap(s.Client, p):
				x.refresh(one, d)
			default:
				x.logf("%v gives up page %d", o, p)
				x.dropBases(x.f.BeginEvict(one, o).Commit())
				delete(x.devices[d], p)
			}
		}
	}
	if m := x.mappings[s.Client]; m.writable {
		x.track(m.pages, d)
		x.hollow(m.pages, d)
	}
}

// collectOthers brings home other devices' releases of pages that a device has: only then the pages count as stale.
func (x *executor) collectOthers(d int) {
	for p := x.first; p < x.all().End; p++ {
		one := page.Range{Start: p, End: p + 1}
		for other := range x.devices {
			if other != d && x.devices[d][p] != nil && len(x.f.PendingOf(one, versions.GPU(other))) > 0 {
				x.collect(one, false)
				break
			}
		}
	}
}

// hollow tracks memory of zeros for pages that the device does not have.
func (x *executor) hollow(rg page.Range, d int) {
	for p := rg.Start; p < rg.End; p++ {
		if x.devices[d][p] == nil {
			x.devices[d][p] = &replicaMemory{make([]byte, page.Size), make([]byte, page.Size)}
			x.logf("gpu%d may store into page %d, which it does not have", d, p)
		}
	}
	if x.fault != unwatched {
		x.f.Hollow(rg, versions.GPU(d))
	}
}

// othersMap reports whether another client maps page p on the client's device.
func (x *executor) othersMap(client model.Client, p page.Index) bool {
	for c, m := range x.mappings {
		if c != client && x.layout.Device(c) == x.layout.Device(client) && m.pages.Contains(p) {
			return true
		}
	}
	return false
}

func (x *executor) acquire(s model.Step) {
	rg := x.within(s)
	x.flush((rg.Start - x.first).Offset(), rg.Bytes(), false)
	x.refresh(rg, x.layout.Device(s.Client))
}

// refresh brings pages up to date on a device.
func (x *executor) refresh(rg page.Range, d int) {
	o := versions.GPU(d)
	x.collect(rg, false)
	x.rehearse("an acquire", func() { x.f.BeginAcquire(rg, o).End() })
	plan := x.f.BeginAcquire(rg, o)
	for _, u := range plan.Updates() {
		x.logf("%v %v of %v, base %v", u.Mode, u.Range, o, u.Base)
		for p := u.Range.Start; p < u.Range.End; p++ {
			if x.aborts != nil && x.aborts.IntN(8) == 0 { // what is left is brought by another plan
				plan.End()
				plan = x.f.BeginAcquire(rg, o)
				x.aborted++
			}
			x.update(plan, p, d, u)
		}
	}
	plan.End()
	x.track(rg, d)
}

// track tracks the pages that a device has and that programs may store into.
func (x *executor) track(rg page.Range, d int) {
	x.rehearse("an exposure", func() { x.f.BeginExpose(rg, versions.GPU(d)).Abort() })
	plan := x.f.BeginExpose(rg, versions.GPU(d))
	var storing []page.Range
	for _, run := range plan.Untracked {
		for p := run.Start; p < run.End; p++ {
			if x.writers(d, p) {
				m := x.devices[d][p]
				m.agreed = bytes.Clone(m.data)
				storing = page.AppendRange(storing, page.Range{Start: p, End: p + 1})
			}
		}
	}
	plan.Commit(storing)
}

func (x *executor) update(plan AcquirePlan, p page.Index, d int, u Update) {
	m := x.devices[d][p]
	switch {
	case u.Mode == ModeFill && m == nil:
		m = &replicaMemory{data: bytes.Clone(x.home[p])}
		x.devices[d][p] = m
	case u.Mode != ModePatch || x.fault == copiedOver:
		copy(m.data, x.home[p])
	default:
		base := x.base(p, u.Base)
		if base == nil && x.fault != forgottenBase && x.fault != oldTail {
			x.failf("page %d of device %d is patched without its base %d", p, d, u.Base)
		}
		for i := range base {
			if x.home[p][i] != base[i] && m.data[i] == base[i] {
				m.data[i] = x.home[p][i]
			}
		}
	}
	m.agreed = bytes.Clone(x.home[p])
	x.dropBases(plan.Updated([]page.Range{{Start: p, End: p + 1}}, x.writers(d, p)))
}

func (x *executor) publish(c model.Client, rg page.Range) {
	o := x.owner(c)
	modified := x.modified(rg, o.Ordinal())
	if x.fault == skippedVersion && len(modified) > 1 {
		modified = modified[:1]
	}
	x.rehearse("a release", func() { x.f.BeginRelease(modified, rg, o).Abort() })
	plan := x.f.BeginRelease(modified, rg, o)
	for _, rg := range plan.Collect {
		x.collect(rg, false)
	}
	drain := plan.Commit()
	x.logf("%v releases %v, the kernel drops %v", o, modified, drain.Pages)
	x.releases[c] = &executorRelease{rg, drain}
}

func (x *executor) finish(c model.Client) {
	rel := x.releases[c]
	x.drain(rel)
	// Another program's release of the same pages may have published what this one stored.
	for other := range x.layout.Clients() {
		if r := x.releases[model.Client(other)]; r != nil && len(r.drain.Pages) > 0 &&
			slices.Contains(x.f.Draining(rel.pages), r.drain.ID) {
			x.drain(r)
		}
	}
	delete(x.releases, c)
}

func (x *executor) drain(rel *executorRelease) {
	for len(rel.drain.Pages) > 0 {
		for _, d := range rel.drain.Pages {
			x.drop(d)
		}
		if x.fault == heldAgain {
			rel.drain.GiveUp()
			rel.drain = Drain{}
			return
		}
		if rel.drain = rel.drain.Dropped(); len(rel.drain.Pages) > 0 {
			x.logf("the kernel drops %v again", rel.drain.Pages)
		}
	}
}

func (x *executor) dontNeed(s model.Step) {
	rg, d := x.within(s), x.layout.Device(s.Client)
	if x.mappings[s.Client].writable {
		x.publish(s.Client, rg)
		x.finish(s.Client)
	}
	for p := rg.Start; p < rg.End; p++ {
		one := page.Range{Start: p, End: p + 1}
		if x.othersMap(s.Client, p) || len(x.f.Draining(one)) > 0 {
			continue
		}
		x.collect(one, false)
		if len(x.modified(one, d)) == 0 {
			x.dropBases(x.f.BeginEvict(one, x.owner(s.Client)).Commit())
			delete(x.devices[d], p)
			if x.mappings[s.Client].writable {
				x.hollow(one, d)
			}
		}
	}
}

func (x *executor) evict(s model.Step) {
	d := x.layout.Device(s.Client)
	rg := x.covering(s.Off, s.Len)
	for p := rg.Start; p < rg.End; p++ {
		one := page.Range{Start: p, End: p + 1}
		mapped := false
		for c, m := range x.mappings {
			mapped = mapped || x.layout.Device(c) == d && m.pages.Contains(p)
		}
		if mapped || x.devices[d][p] == nil {
			continue
		}
		x.rehearse("an eviction", func() { x.f.BeginEvict(one, versions.GPU(d)).Abort() })
		plan := x.f.BeginEvict(one, versions.GPU(d))
		if plan.Draining {
			plan.Abort()
			continue
		}
		x.collect(one, false)
		x.dropBases(plan.Commit())
		delete(x.devices[d], p)
	}
}

func (x *executor) untrack() {
	for d := range x.devices {
		for p := x.all().Start; p < x.all().End; p++ {
			if !x.writers(d, p) {
				one := page.Range{Start: p, End: p + 1}
				x.dropBases(x.f.Untrack(one, versions.GPU(d)))
				if !slices.Contains(x.f.Holders(one), versions.GPU(d)) {
					delete(x.devices[d], p) // it was hollow
				}
			}
		}
	}
}
