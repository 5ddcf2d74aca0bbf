package pagecache

import (
	"cmp"
	"context"
	"math"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/kernel"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/versions"
)

// ChangeKind says how a request changes home.
type ChangeKind uint8

const (
	// ChangeWrite stores bytes at [Off, Off+Len).
	ChangeWrite ChangeKind = iota
	// ChangeAppend stores Len bytes at the end of the file.
	ChangeAppend
	// ChangeTruncate sets the size of the file to Len.
	ChangeTruncate
	// ChangeZero makes [Off, Off+Len) read as zero (punch hole, zero range).
	ChangeZero
	// ChangeAllocate reserves space for [Off, Off+Len) and may grow the file.
	ChangeAllocate
	// ChangeShift moves everything from Off on (collapse and insert range).
	ChangeShift
	// ChangeTimes sets times, and changes no bytes.
	ChangeTimes
)

// Change is a change of home by a request.
type Change struct {
	Kind     ChangeKind
	Off, Len int64
	// WriteBack means that the bytes are whole dirty pages from the kernel, not bytes that a program just wrote.
	WriteBack bool
	// Direct means that a ChangeWrite does not go through the kernel's pages: they lack its bytes.
	Direct bool
	// Bytes are the bytes of a ChangeWrite, or nil if they are not known. ChangeHome may replace the slice before it
	// calls do, and does not change its bytes.
	Bytes *[]byte
	// Known is the size that the kernel knows, if that may exceed home's: bytes below it are part of the file. It is
	// negative if the size is not known. It counts for all changes but those with WriteBack.
	Known int64
}

// held returns the pages that the kernel may newly hold after the change: pages that a program wrote as a whole,
// without reading them. The kernel writes part of a page only into a copy that it holds already, and writes back only
// pages that it holds.
func (c Change) held() page.Range {
	if c.WriteBack || c.Kind != ChangeWrite && c.Kind != ChangeAppend {
		return page.Range{}
	}
	return page.Span(c.Off, c.Len).Whole()
}

// tell notes that the kernel's copies have what the change made: the bytes that the kernel sent, or zeros.
func (c Change) tell(k *kernel.Kernel, sent []byte) {
	switch {
	case c.Kind == ChangeZero:
		k.Zeroes(page.Span(c.Off, c.Len))
	case !c.Direct:
		k.Sends(c.Off, sent)
	}
}

// ChangeHome makes a change of home under the rules of coherence. It calls do with the offset and the length of the
// change, and returns do's error. A ChangeZero may be made in several parts, with a call for each. Released bytes of
// the pages are brought home first, since the writer may have seen them; if that fails, do is not called. ErrDetached
// means that no device holds anything of the file any more and that do was not called: the caller then changes home
// directly. ChangeHome blocks on home and on devices, never on the kernel. If ctx ends before do is called, home is
// unchanged; a change that has begun is completed.
func (f *File) ChangeHome(ctx context.Context, c Change, do func(off, n int64) error) error {
	if c.Kind == ChangeWrite && c.Len > 0 {
		if done, err := f.writeBeside(ctx, c, do); done {
			return err
		}
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return ErrDetached
	}
	if c.Kind == ChangeTimes {
		return do(0, 0)
	}
	if err := f.lookLocked(ctx); err != nil {
		return err
	}
	for rest := c; ; {
		part := f.partLocked(rest)
		err := f.changeLocked(ctx, part, 0, do)
		ctx = context.WithoutCancel(ctx)
		rest.Off, rest.Len = rest.Off+part.Len, rest.Len-part.Len
		if err != nil || part.Kind != ChangeZero || rest.Len <= 0 {
			return err
		}
	}
}

// changeLocked makes one part of a change. found counts how often it started over because home changed.
func (f *File) changeLocked(ctx context.Context, c Change, found besides, do func(off, n int64) error) error {
	asked := c
	before, err := f.settleEndLocked(ctx)
	if err != nil {
		return err
	}
	former := max(before, c.Known) // where the file ends for the kernel; what lies behind is zeroed if the file grows
	if c.Known < 0 && f.kernel.MayBeLonger() {
		former = math.MaxInt64
	}
	if c.Kind == ChangeTruncate {
		return f.truncateLocked(ctx, before, former, c.Len, do)
	}
	if c.Kind == ChangeAppend {
		c.Off = before
	}
	changed := page.Span(c.Off, c.Len)
	rg := changed.Pages()
	if c.Kind == ChangeShift {
		rg.End = max(page.Span(before, c.Len).Pages().End, f.lrc.End())
	}
	room, err := f.bringForChangeLocked(ctx, c, rg)
	if err != nil {
		return err
	}
	if f.home.Size() != before { // a collect found a direct change
		return f.changeAgainLocked(ctx, asked, found, &changedBeside{}, do)
	}
	// When the file grows, bytes that programs stored past end of file do not become part of it.
	begin := func() error { return nil }
	if changed.End > former && !(f.kernel.CachesWrites() && c.WriteBack) {
		if err := f.keepEndLocked(ctx, former); err != nil {
			return err
		}
		begin = func() error { return f.zeroReplicasLocked(ctx, page.Bytes{Off: former, End: changed.End}) }
	}
	done := false
	if c.Kind != ChangeAllocate {
		done, err = f.writeLocked(c, rg, begin, do)
		if !done {
			return f.changeAgainLocked(ctx, asked, found, err, do)
		}
	} else if err = begin(); err == nil {
		done, err = true, do(c.Off, c.Len)
		f.spoilLocked(rg)
	}
	if !done {
		return err
	}
	note := f.changedSizeLocked(ctx, c, before, changed.End)
	if !room {
		f.relieveLocked(ctx, 0)
	}
	return cmp.Or(err, note)
}

// changeAgainLocked starts a change over if err says that home was changed directly during it. Otherwise it returns
// err.
func (f *File) changeAgainLocked(
	ctx context.Context, c Change, found besides, err error, do func(off, n int64) error,
) error {
	pages, again, err := found.again(err)
	if !again {
		return err
	}
	if err := f.foundChangedLocked(ctx, pages); err != nil {
		return err
	}
	return f.changeLocked(ctx, c, found, do)
}

// settleEndLocked returns the size of home. Before that it handles direct changes since the last look: a changed size,
// and doubt about the page at the end. A change may extend the file from there.
func (f *File) settleEndLocked(ctx context.Context) (size int64, err error) {
	sig, err := f.home.Signature()
	if err != nil {
		return 0, err
	}
	if sig.Size != f.home.Size() {
		if err := f.changedBesideLocked(ctx, sig.Size); err != nil {
			return 0, err
		}
	}
	return sig.Size, f.settleHomeLocked(ctx, page.Span(sig.Size, 1).Pages())
}

// bringForChangeLocked brings home the bytes that must be there before rg changes. room reports whether there is memory
// for the bases that the change needs. If not, replicas were brought up to date to make room.
func (f *File) bringForChangeLocked(ctx context.Context, c Change, rg page.Range) (room bool, err error) {
	landing := rg
	if c.Kind == ChangeShift {
		landing.End = page.From(0).Pages().End
	}
	if err := f.landLocked(landing); err != nil {
		return false, err
	}
	if !f.lrc.Held(rg) {
		return true, nil
	}
	if err := f.settleHomeLocked(ctx, rg); err != nil {
		return false, err
	}
	if err := f.collectLocked(ctx, rg, false); err != nil {
		return false, err
	}
	if pages, _ := f.keepsLocked(rg, versions.CPU, math.MaxInt64); pages > 0 && c.Kind != ChangeAllocate {
		return f.relieveLocked(ctx, pages), nil
	}
	return true, nil
}

// changedSizeLocked records the size of home after a change that reached up to end. before is the size before it.
func (f *File) changedSizeLocked(ctx context.Context, c Change, before, end int64) error {
	if c.Kind != ChangeShift {
		return f.home.NoteSize(before, max(before, end))
	}
	err := f.home.NoteSize(0, math.MaxInt64)
	if f.home.Size() < before {
		err = cmp.Or(err, f.cutLocked(ctx, f.home.Size()))
	}
	return err
}

// writeLocked changes the bytes of rg, where nothing is pending. It calls begin before do. done reports whether do was
// called.
func (f *File) writeLocked(c Change, rg page.Range, begin func() error,
	do func(off, n int64) error) (done bool, err error) {
	plan := f.lrc.BeginWrite(rg)
	k := f.newKeepingLocked(plan.Keep)
	if err := k.read(f); err != nil {
		k.free(f)
		plan.Abort()
		return false, err
	}
	f.keepLocked(k)
	var sent []byte
	if c.Bytes != nil {
		sent = *c.Bytes
	}
	if err = begin(); err == nil && c.WriteBack && c.Bytes != nil {
		*c.Bytes, err = f.kernel.StoresOnly(c.Off, sent, f.homeLocked().ReadAt)
	}
	if err != nil {
		f.dropBasesLocked(plan.Keep)
		plan.Abort()
		return false, err
	}
	f.clean.Changed(rg) // stops reads without mu from here on; Commit reports the change again
	if err = do(c.Off, c.Len); err == nil {
		c.tell(f.kernel, sent)
	}
	f.spoilLocked(rg)
	plan.Commit(c.held()) // also after an error: part of it may have been written
	return true, err
}

// truncateLocked sets the size of home, which is before. Replicas read as zero past the new end at once, as a mapping
// of the file would. former is where the file ends for the kernel: devices may have stored below it.
func (f *File) truncateLocked(ctx context.Context, before, former, size int64, do func(off, n int64) error) error {
	if size > former {
		if err := f.keepEndLocked(ctx, former); err != nil {
			return err
		}
		if err := f.zeroReplicasLocked(ctx, page.Bytes{Off: former, End: size}); err != nil {
			return err
		}
	}
	if err := f.settleHomeLocked(ctx, page.Span(size, 1).Pages()); err != nil {
		return err
	}
	if size < before {
		if err := f.keepEndLocked(ctx, size); err != nil {
			return err
		}
	}
	defer f.spoilLocked(page.From(min(before, size)).Pages()) // after do: fills read home meanwhile
	if size >= before {
		if err := do(size, 0); err != nil {
			return err
		}
		f.home.SetSize(size)
		return nil
	}
	plan := f.lrc.BeginTruncate(page.Count(size))
	f.clean.Changed(page.From(size).Pages())
	if err := do(size, 0); err != nil {
		plan.Abort()
		return err
	}
	f.home.SetSize(size)
	f.kernel.Zeroes(page.From(size))
	return f.cutPlannedLocked(ctx, size, plan)
}

// cutLocked makes replicas agree with a home that became shorter: zeros past size, and nothing pending there. It
// carries on if ctx ends.
func (f *File) cutLocked(ctx context.Context, size int64) error {
	return f.cutPlannedLocked(ctx, size, f.lrc.BeginTruncate(page.Count(size)))
}

// cutPlannedLocked is cutLocked with a given plan.
func (f *File) cutPlannedLocked(ctx context.Context, size int64, plan lrc.TruncatePlan) error {
	f.cutFlightsLocked(size)
	f.dropBasesLocked(plan.Commit())
	return f.zeroReplicasLocked(context.WithoutCancel(ctx), page.From(size))
}

// zeroReplicasLocked zeroes the given bytes in every replica. They lie past the old or the new end of home. Bases and
// digests are zeroed too, so the zeros do not count as stores by a device. Once begun, it carries on if ctx ends. For a
// page that is zeroed in part, keepEndLocked has kept the base.
func (f *File) zeroReplicasLocked(ctx context.Context, bytes page.Bytes) error {
	rg := bytes.Pages().Intersect(page.Range{End: f.lrc.End()})
	f.changed(rg)
	if rg.Empty() {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	for _, h := range f.holdings {
		if !f.lrc.Held(rg) {
			continue
		}
		var err error
		h.each(rg, func(x *extent, part page.Range) {
			if zero := bytes.Intersect(part.Span()); err == nil && !zero.Empty() {
				err = h.dev.moves.Zero(ctx, mover.WriteBack, x.Memory(), x.offset(zero.Off), zero.Len())
			}
		})
		if err != nil {
			if f.lostLocked(h.dev, err) {
				continue
			}
			return err
		}
		h.rebaseZeroedLocked(rg, bytes)
	}
	return nil
}

// rebaseZeroedLocked zeroes bytes in the bases of the tracked pages of rg, and computes their digests again.
func (h *holding) rebaseZeroedLocked(rg page.Range, bytes page.Bytes) {
	f := h.f
	for part := range f.lrc.Parts(rg, collectWindow) {
		for _, b := range f.lrc.Bases(part, h.owner) {
			h.rebaseRunLocked(b, bytes)
		}
	}
}

// rebaseRunLocked is rebaseZeroedLocked for a run with one base.
func (h *holding) rebaseRunLocked(of lrc.PageBase, bytes page.Bytes) {
	f := h.f
	whole := of.Range.Intersect(bytes.Whole())
	if !whole.Empty() {
		for p := whole.Start; of.Base != lrc.BaseHome && p < whole.End; p++ {
			if f.bases.at(p, of.Base) != nil {
				f.bases.put(p, of.Base, zeroPage)
			}
		}
		f.countBases()
		h.each(whole, func(x *extent, part page.Range) { x.agreeOnZeros(part) })
	}
	// At most two pages are zeroed in part.
	buf := make([]byte, page.Size)
	for _, run := range page.Subtract([]page.Range{of.Range}, whole) {
		for p := run.Start; p < run.End; p++ {
			base := buf // zeros, as past the end of home
			if kept := f.bases.at(p, of.Base); of.Base != lrc.BaseHome && copies(kept) > 0 {
				base = kept[:]
			}
			clear(base[max(bytes.Off-p.Offset(), 0):min(bytes.End-p.Offset(), page.Size)])
			h.rebaseLocked(page.Range{Start: p, End: p + 1}, base)
		}
	}
}
