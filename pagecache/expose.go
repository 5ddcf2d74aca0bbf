package pagecache

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A client that is given the memory of an extent can see all of it, whatever range it mapped. So the memory must not
// contain bytes that the client could not read in the file: bytes that were overwritten, punched out or cut off since
// they were brought to the device. Such bytes are in pages that the device holds stale. Pages that the device does not
// hold are zero, because every removal of pages from a device zeroes them.

// zeroPages is the most zero pages that one scan compares: 64 MiB.
const zeroPages = 1 << 14

func notHollow(b lrc.Base) bool { return b != lrc.BaseZero }
func onHome(b lrc.Base) bool    { return b == lrc.BaseHome }

// eachAgreed calls fn with the pages of part and the digests of their bases, which fn must not change. If all bases are
// zero pages, the digests are those of the device, not x's own.
func (x *extent) eachAgreed(part page.Range, fn func(part page.Range, agreed []gpubackend.Digest)) {
	first := x.pages().Start
	for rest := part; !rest.Empty(); {
		run, own := rest, false
		if x.agreed != nil {
			var end page.Index
			if own, end = x.agreed.run(rest.Start-first, rest.End-first); end < rest.End-first {
				run.End = first + end
			}
		}
		rest.Start = run.End
		if own {
			fn(run, x.agreedAt(run))
			continue
		}
		for some := range cut(run, zeroPages) {
			fn(some, x.dev.zeros[:some.Len()])
		}
	}
}

// agreeOnZeros sets the digests of part to those of zero pages.
func (x *extent) agreeOnZeros(part page.Range) {
	x.eachAgreed(part, func(some page.Range, agreed []gpubackend.Digest) {
		if &agreed[0] != &x.dev.zeros[0] {
			for some := range cut(some, zeroPages) {
				copy(x.agreeOn(some), x.dev.zeros)
			}
		}
	})
}

// litter marks the extents of ranges: pages that the device does not hold may contain leftovers.
func (h *holding) litter(ranges []page.Range) {
	for _, rg := range ranges {
		h.each(rg, func(x *extent, _ page.Range) { x.littered = true })
	}
}

// giveUpLocked drops what h has of the pages of rg, where nothing is pending, and zeroes them.
func (h *holding) giveUpLocked(ctx context.Context, rg page.Range) error {
	f := h.f
	f.dropBasesLocked(f.lrc.BeginEvict(rg, h.owner).Commit())
	return h.zeroLocked(ctx, rg)
}

// zeroPagesLocked zeroes the device memory of the pages of rg.
func (h *holding) zeroPagesLocked(ctx context.Context, rg page.Range) (err error) {
	f := h.f
	f.changed(rg)
	h.each(rg, func(x *extent, part page.Range) {
		if err == nil {
			err = h.dev.moves.Zero(ctx, mover.Acquire, x.Memory(), x.off(part.Start), part.Bytes())
		}
	})
	return err
}

// zeroLocked zeroes pages that h does not hold. If that fails, it marks them as littered.
func (h *holding) zeroLocked(ctx context.Context, rg page.Range) error {
	f := h.f
	if err := h.zeroPagesLocked(ctx, rg); err != nil {
		h.litter([]page.Range{rg})
		f.lostLocked(h.dev, err)
		return h.dev.fault(err)
	}
	return nil
}

// extentsOf returns the pages of all extents that m maps.
func (m *Mapping) extentsOf() page.Range {
	all := m.pin.Extents()
	return page.Range{Start: all[0].Pages().Start, End: all[len(all)-1].Pages().End}
}

// exposure is the work to do before a client is given memory.
type exposure struct {
	fetch  []page.Range // stale, and used by a client, possibly the one that is given the memory
	giveUp []page.Range // stale, and used by no client
	absent []page.Range // not held
}

// exposureLocked examines everything that m's client will be able to see.
func (f *File) exposureLocked(m *Mapping) (e exposure) {
	stale := f.lrc.Stale(m.extentsOf(), m.h.owner)
	if len(stale) == 0 {
		return e
	}
	var used []tracking
	for _, u := range stale {
		switch {
		case u.Mode == lrc.ModeFill:
			e.absent = page.AppendRange(e.absent, u.Range)
		case u.Mode == lrc.ModePatch && u.Base == lrc.BaseZero:
			// The page has zeros, and later stores by programs.
		case u.Mode == lrc.ModePatch:
			e.fetch = page.AppendRange(e.fetch, u.Range)
		default:
			used = f.splitLocked(u.Range, func(o *Mapping) bool { return o.h == m.h && (o != m || !m.lazy) })
			for _, part := range used {
				if part.track {
					e.fetch = page.AppendRange(e.fetch, part.pages)
				} else {
					e.giveUp = page.AppendRange(e.giveUp, part.pages)
				}
			}
		}
	}
	return e
}

// collectExposedLocked brings home what other devices released of pages that m's device holds. Only then are these
// pages known to be stale.
func (f *File) collectExposedLocked(ctx context.Context, m *Mapping) error {
	all := m.extentsOf()
	var absent []page.Range
	for _, u := range f.lrc.Stale(all, m.h.owner) {
		if u.Mode == lrc.ModeFill {
			absent = page.AppendRange(absent, u.Range)
		}
	}
	held := subtract([]page.Range{all}, absent)
	for o := range f.holdings {
		if o == m.h.owner {
			continue
		}
		var pending []page.Range
		for _, p := range f.lrc.PendingOf(all, o) {
			pending = page.AppendRange(pending, p.Range)
		}
		for _, rg := range intersect(pending, held) {
			if err := f.collectLocked(ctx, rg, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// refreshExposed does most of the work of exposeLocked in advance. It unlocks File.mu in between.
func (f *File) refreshExposed(ctx context.Context, m *Mapping) (err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	for rest := m.extentsOf(); !rest.Empty(); {
		if rest.Start, err = f.settleSomeLocked(ctx, rest); err != nil {
			f.mu.Unlock()
			return err
		}
		f.mu.Unlock() // let requests get the lock
		if err := f.mu.LockIn(ctx); err != nil {
			return err
		}
	}
	if err := f.collectExposedLocked(ctx, m); err != nil {
		f.mu.Unlock()
		return err
	}
	e := f.exposureLocked(m)
	f.mu.Unlock()
	for _, rg := range e.fetch {
		if _, err := f.acquire(ctx, m.h, rg); err != nil {
			return err
		}
	}
	return nil
}

// exposeLocked makes every byte that m's client will be able to see current or zero. It also makes sure that all stores
// by the client into its pages will be detected. File.mu must stay locked until the client has the memory.
func (f *File) exposeLocked(ctx context.Context, m *Mapping) error {
	h := m.h
	if err := f.settleHomeLocked(ctx, m.extentsOf()); err != nil { // direct changes in SOURCE make pages stale
		return err
	}
	if err := f.collectExposedLocked(ctx, m); err != nil {
		return err
	}
	// Clients that had the memory for writing may have stored anywhere in it.
	var stored []page.Range
	h.each(m.extentsOf(), func(x *extent, part page.Range) {
		if x.writable || x.littered {
			stored = page.AppendRange(stored, part)
		}
	})
	for _, rg := range stored {
		if err := f.zeroTailLocked(ctx, m, rg); err != nil {
			return err
		}
	}
	absent, err := f.refreshExposedLocked(ctx, m)
	if err != nil {
		return err
	}
	for _, rg := range intersect(absent, stored) {
		if err := h.zeroLocked(ctx, rg); err != nil {
			return err
		}
	}
	h.each(m.extentsOf(), func(x *extent, _ page.Range) { x.littered = false })
	if !m.writable {
		return nil
	}
	if err := h.trackLocked(ctx, m.pages); err != nil {
		return err
	}
	for _, rg := range intersect(absent, []page.Range{m.pages}) {
		h.hollowLocked(rg)
	}
	return nil
}

// refreshExposedLocked leaves nothing stale that m's client will be able to see. It returns the pages that the device
// does not hold then. Bringing pages involves looks at home, which may find that home moved on in others. So it repeats
// until it finds nothing stale.
func (f *File) refreshExposedLocked(ctx context.Context, m *Mapping) (absent []page.Range, err error) {
	for {
		e := f.exposureLocked(m)
		if len(e.fetch) == 0 && len(e.giveUp) == 0 {
			return e.absent, nil
		}
		for _, rg := range e.fetch {
			if err := f.acquireAllLocked(ctx, m.h, rg); err != nil {
				return nil, err
			}
		}
		for _, rg := range e.giveUp {
			if err := m.h.giveUpLocked(ctx, rg); err != nil {
				return nil, err
			}
		}
	}
}

// hollowLocked starts to track the pages of rg that h does not hold, to detect stores into them. They are zero.
func (h *holding) hollowLocked(rg page.Range) {
	f := h.f
	h.each(rg, func(x *extent, part page.Range) {
		x.agreeOnZeros(part)
	})
	f.lrc.Hollow(rg, h.owner)
}

// zeroTailLocked zeroes stores past end of file in the pages of rg. It leaves out pages that other mappings have for
// writing, since their programs may be using them. On each device, the page at the end of file may be stale past the
// end.
func (f *File) zeroTailLocked(ctx context.Context, m *Mapping, rg page.Range) error {
	h, owner := m.h, m.h.owner
	tail := rg.Intersect(page.Range{Start: page.Index(f.home.Size() >> page.Shift), End: rg.End})
	for _, part := range f.splitLocked(tail, func(o *Mapping) bool { return o != m && o.h == h && o.writable }) {
		if part.track || part.pages.Empty() {
			continue
		}
		from := max(f.home.Size(), part.pages.Offset())
		if err := f.keepEndLocked(ctx, from); err != nil {
			return err
		}
		f.changed(part.pages)
		var err error
		h.each(part.pages, func(x *extent, pages page.Range) {
			if at := max(from, pages.Offset()); err == nil {
				err = h.dev.moves.Zero(ctx, mover.Acquire, x.Memory(), x.offset(at), pages.End.Offset()-at)
			}
			past := page.Range{Start: page.Count(from), End: pages.End}
			for _, run := range f.lrc.TrackedBy(past.Intersect(pages), owner, notHollow) {
				x.agreeOnZeros(run)
			}
		})
		if err != nil {
			f.lostLocked(h.dev, err)
			return h.dev.fault(err)
		}
		// The base of the page at the end of file may have bytes past the end as well.
		last := page.Range{Start: part.pages.Start, End: page.Count(from)}
		h.rebaseZeroedLocked(last, page.From(from))
	}
	return nil
}
