package pagecache

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// MaxGroupRanges is the most ranges that a group may have.
const MaxGroupRanges = 1 << 17

// GroupRange is a range of a mapping: Len bytes at Off.
type GroupRange struct {
	Of       *Mapping
	Off, Len int64
}

// Group is a set of pages of mappings whose stores are released all at once, or not at all. It is open from BeginGroup
// until it is released or aborted. The end of one of its mappings aborts it.
//
// Only programs on the same device see the stores of an open group. When the group began, home had everything that was
// released of its pages, so nobody collects them; and only the group's release publishes them (holding.grouped).
// Readers meanwhile get home's bytes, which have none of the group's stores.
type Group struct {
	c        *Cache       // immutable
	parts    []*groupPart // ordered by file and owner; immutable
	files    []*File      // immutable
	mappings []*Mapping   // immutable
	host     int64        // bytes of host memory charged for it; immutable

	mu    sync.Mutex // held during a release or an abort, which takes I/O
	ended error      // why it is not open; nil while it is. Protected by mu
}

// groupPart is the part of a group in one file on one device.
type groupPart struct {
	f     *File
	h     *holding
	pages []page.Range // ascending, and not adjacent
}

// span returns the range from the first page to the last one.
func (p *groupPart) span() page.Range {
	return page.Range{Start: p.pages[0].Start, End: p.pages[len(p.pages)-1].End}
}

var (
	errGroupReleased = fail(syscall.EINVAL, "the group was released already")
	errGroupAborted  = fail(syscall.ECANCELED, "the group was aborted: nothing of it is released")
)

// BeginGroup opens a group of ranges, which may overlap. From then on stores into their pages belong to the group, and
// so do earlier stores that are not released yet. BeginGroup brings home what the mappings' devices released of the
// pages before, and blocks on that. Errors: EINVAL (no ranges, too many, or one outside its mapping), EACCES (a
// read-only mapping), EOPNOTSUPP (a mapping whose memory moves), EBUSY (a page is in another open group on its device),
// ENOMEM (the list of ranges takes too much host memory), and errors of homes.
func (c *Cache) BeginGroup(ctx context.Context, ranges []GroupRange) (*Group, error) {
	if len(ranges) == 0 || len(ranges) > MaxGroupRanges {
		return nil, fail(syscall.EINVAL, "a group of %d ranges; it has 1 to %d", len(ranges), MaxGroupRanges)
	}
	g := &Group{c: c}
	seen := make(map[*Mapping]bool)
	parts := make(map[*holding]*groupPart)
	for _, r := range ranges {
		m := r.Of
		rg, err := m.at(r.Off, r.Len)
		if err != nil {
			return nil, err
		}
		if !m.writable {
			return nil, fail(syscall.EACCES, "a mapping of %s is read-only; a group needs writable mappings", m.f.Name())
		}
		if m.client != nil {
			return nil, fail(syscall.EOPNOTSUPP, "the memory of a mapping of %s can move; groups take no such mapping",
				m.f.Name())
		}
		if !seen[m] {
			if err := m.enter(m.dev); err != nil {
				return nil, err
			}
			defer m.calls.Done()
			seen[m] = true
			g.mappings = append(g.mappings, m)
		}
		p := parts[m.h]
		if p == nil {
			p = &groupPart{f: m.f, h: m.h}
			parts[m.h], g.parts = p, append(g.parts, p)
		}
		p.pages = append(p.pages, rg)
	}
	for _, p := range g.parts {
		p.pages = covered(p.pages)
		g.files = append(g.files, p.f)
		g.host += int64(len(p.pages)) * 32 // here and in holding.grouped
	}
	slices.SortFunc(g.parts, func(a, b *groupPart) int {
		return cmp.Or(cmp.Compare(a.f.serial, b.f.serial), cmp.Compare(a.h.owner, b.h.owner))
	})
	slices.SortFunc(g.files, func(a, b *File) int { return cmp.Compare(a.serial, b.serial) })
	g.files = slices.Compact(g.files)
	return g, g.open(ctx)
}

// covered returns the pages of ranges, ascending and joined.
func covered(ranges []page.Range) (out []page.Range) {
	slices.SortFunc(ranges, func(a, b page.Range) int { return cmp.Compare(a.Start, b.Start) })
	for _, rg := range ranges {
		if n := len(out); n > 0 && rg.Start <= out[n-1].End {
			out[n-1].End = max(out[n-1].End, rg.End)
			continue
		}
		out = append(out, rg)
	}
	return out
}

// leastGroup is the size of a list of ranges up to which a group is opened even if --host-memory is full. A client may
// open many groups.
const leastGroup = leastList / 4

// open claims the pages of the group, and brings home what was released of them.
func (g *Group) open(ctx context.Context) error {
	g.c.memory.charge(memoryGroups, g.host)
	if g.host > leastGroup && !g.c.makeRoom(0) {
		g.c.memory.charge(memoryGroups, -g.host)
		return fail(syscall.ENOMEM, "the list of the group's ranges takes %s of host memory, of which %s are left; use fewer ranges, "+
			"or mount with a larger --host-memory", humanize.IBytes(uint64(g.host)),
			humanize.IBytes(uint64(g.c.memory.left())))
	}
	for i, p := range g.parts {
		if err := p.take(ctx); err != nil {
			g.close(ctx, g.parts[:i], err)
			return err
		}
	}
	err := g.begin(ctx)
	if err != nil {
		g.mu.Lock()
		g.close(ctx, g.parts, err)
		g.mu.Unlock()
	}
	return err
}

// begin ties the group to its mappings, and brings home what their devices released of its pages.
func (g *Group) begin(ctx context.Context) error {
	for _, m := range g.mappings {
		if err := m.join(ctx, g); err != nil {
			return err
		}
	}
	for _, p := range g.parts {
		if err := p.bringHome(ctx); err != nil {
			return err
		}
	}
	return nil
}

// take claims the pages for the group.
func (p *groupPart) take(ctx context.Context) error {
	if err := p.f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer p.f.mu.Unlock()
	if other := intersect(p.h.grouped, p.pages); len(other) > 0 {
		return fail(syscall.EBUSY, "pages %s of %s are in another open group on device %d", other[0], p.f.Name(),
			p.h.dev.info.Ordinal)
	}
	p.h.grouped = union(p.h.grouped, p.pages)
	return nil
}

func (p *groupPart) leaveLocked() { p.h.grouped = subtract(p.h.grouped, p.pages) }

// bringHome brings home what the device released of the pages. No more of them are released meanwhile.
func (p *groupPart) bringHome(ctx context.Context) error {
	for {
		if err := p.f.kernel.Await(ctx, p.span()); err != nil {
			return err
		}
		if err := p.f.mu.LockIn(ctx); err != nil {
			return err
		}
		if err := p.f.collectRangesLocked(ctx, p.pendingLocked(), holdCollect); err != nil {
			p.f.mu.Unlock()
			return err
		}
		done := len(p.pendingLocked()) == 0
		p.f.mu.Unlock()
		if err := p.h.dev.gone(); err != nil || done {
			return err
		}
	}
}

// pendingLocked returns the pages that the device released and home does not have yet.
func (p *groupPart) pendingLocked() []page.Range {
	return intersect(pendingOf(&p.f.lrc, p.span(), p.h.owner), p.pages)
}

// join makes the end of m abort g. On its first group, m starts to count as a writer of groups.
func (m *Mapping) join(ctx context.Context, g *Group) error {
	if err := m.f.mu.LockIn(ctx); err != nil {
		return err
	}
	first := m.groups == nil
	if first {
		m.groups = make(map[*Group]struct{})
	}
	m.groups[g] = struct{}{}
	m.f.mu.Unlock()
	if first {
		m.f.c.publications.wrote(m.f, 1)
	}
	return nil
}

// abortGroups aborts the groups of m, which is ending.
func (m *Mapping) abortGroups() {
	m.f.mu.Lock()
	wrote := m.groups != nil
	groups := make([]*Group, 0, len(m.groups))
	for g := range m.groups {
		groups = append(groups, g)
	}
	m.f.mu.Unlock()
	for _, g := range groups {
		g.Abort(context.Background())
	}
	if wrote {
		m.f.c.publications.wrote(m.f, -1)
	}
}

// close ends the group. parts are those that still have their pages. The caller holds mu, or g is not shared yet.
func (g *Group) close(ctx context.Context, parts []*groupPart, why error) {
	for _, p := range parts {
		p.f.whenFree(ctx, p.leaveLocked)
	}
	for _, m := range g.mappings {
		m.f.whenFree(ctx, func() { delete(m.groups, g) })
	}
	g.c.memory.charge(memoryGroups, -g.host)
	g.ended = why
}

// Release publishes all stores into the group's pages, and ends the group. It returns the new version of the files, and
// how many pages changed. After it returns, every acquire and read sees all of the group. A concurrent acquire gets all
// of it or nothing. After an error the group is still open and nothing was published, unless the error says that the
// group has ended, or that a device was lost with its part of the group (ENODEV). Errors: EINVAL (the group has ended),
// ECANCELED (it was aborted), ENODEV, and errors of homes.
func (g *Group) Release(ctx context.Context) (version uint64, pages int64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended != nil {
		return 0, 0, g.ended
	}
	start := time.Now()
	for _, m := range g.mappings {
		if err := m.enter(m.dev); err != nil {
			return 0, 0, err
		}
		defer m.calls.Done()
	}
	modified := make([][]page.Range, len(g.parts))
	for i, p := range g.parts {
		if err := p.f.prepareRelease(ctx, p.h, p.span()); err != nil {
			return 0, 0, err
		}
		found, err := p.h.modified(ctx, p.pages)
		if err != nil {
			return 0, 0, err
		}
		if modified[i], err = p.inside(ctx, found); err != nil {
			return 0, 0, err
		}
	}
	g.c.hold.take()
	defer g.c.hold.drop()
	if err := g.c.publications.begin(ctx, g.files); err != nil {
		return 0, 0, err
	}
	if err := g.gone(); err != nil {
		g.c.publications.end(g.files, false)
		return 0, 0, err
	}
	// From here on readers of the files wait, and the rest cannot fail.
	for i, p := range g.parts {
		pages += p.publish(modified[i])
	}
	version = g.c.publications.end(g.files, true)
	for i, p := range g.parts {
		for _, m := range g.mappings {
			if m.h == p.h {
				mine := intersect(modified[i], []page.Range{m.pages})
				m.changed(m.pin, mine, start)
				modified[i] = subtract(modified[i], mine)
			}
		}
	}
	g.close(ctx, nil, errGroupReleased)
	g.c.counters.ReleaseTime.Observe(time.Since(start))
	return version, pages, g.gone()
}

// gone returns an error if a device of the group is lost.
func (g *Group) gone() error {
	for _, p := range g.parts {
		if err := p.h.dev.gone(); err != nil {
			return err
		}
	}
	return nil
}

// inside returns the modified pages with changes before end of file.
func (p *groupPart) inside(ctx context.Context, modified []page.Range) ([]page.Range, error) {
	if err := p.f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	defer p.f.mu.Unlock()
	return p.h.insideFileLocked(ctx, modified)
}

// publish publishes modified pages, and waits until the kernel has dropped its copies of them.
func (p *groupPart) publish(modified []page.Range) (pages int64) {
	ctx, f := context.Background(), p.f
	f.mu.Lock()
	done, err := f.releaseLocked(ctx, p.h, before(modified, page.Count(f.home.Size())), p.span())
	p.leaveLocked()
	if err == nil { // always, since ctx does not end
		f.kernel.Drop(done.drain)
	}
	f.mu.Unlock()
	done.tellTimes(f.kernel.CachesWrites())
	_ = f.kernel.Await(ctx, p.span())
	f.count(func(c *Counters) { c.Releases.Add(1); c.ReleasedPages.Add(done.pages) })
	return done.pages
}

// Abort ends the group. Its pages return to what they last agreed on with home. None of the stores into them are
// released, then or later. Abort does nothing if the group has ended. It blocks on homes and devices.
func (g *Group) Abort(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended != nil {
		return
	}
	ctx = context.WithoutCancel(ctx)
	for _, p := range g.parts {
		p.undo(ctx)
	}
	g.close(ctx, g.parts, errGroupAborted)
}

// undo takes back unreleased stores of programs into the pages of the group. They get their bytes of the last
// agreement with home. If those cannot be read any more, the device gives the pages up, and they read as zeros. Nobody
// releases the pages during the call, and nothing of them is pending.
func (p *groupPart) undo(ctx context.Context) {
	f, h := p.f, p.h
	if err := f.kernel.SendGrowth(ctx); err != nil {
		f.c.log.Warn("stores of an unreleased group past the end that SOURCE knows may become part of the file", "file",
			f.Name(), "error", err)
	}
	modified, err := h.modified(ctx, p.pages)
	if h.dev.gone() != nil {
		return // the stores are lost with the device
	}
	if err != nil {
		modified = p.pages
	}
	for _, rg := range modified {
		for part := range cut(rg, bufferPages) {
			f.mu.Lock()
			if err := p.undoLocked(ctx, part); err != nil {
				f.c.log.Error("stores of an unreleased group cannot be taken back; the device gives up their pages",
					"file", f.Name(), "pages", part.String(), "device", h.dev.info.Ordinal, "error", err)
				p.loseStoresLocked(ctx, part)
			}
			f.mu.Unlock()
		}
	}
}

// undoLocked is undo for at most bufferPages pages.
func (p *groupPart) undoLocked(ctx context.Context, rg page.Range) error {
	f, h := p.f, p.h
	if err := f.lookLocked(ctx); err != nil {
		return err
	}
	if err := f.settleHomeLocked(ctx, rg); err != nil {
		return err
	}
	f.changed(rg)
	for _, zeros := range f.lrc.TrackedBy(rg, h.owner, func(b lrc.Base) bool { return b == lrc.BaseZero }) {
		if err := h.zeroPagesLocked(ctx, zeros); err != nil {
			return err
		}
	}
	b := takeBuffer()
	defer giveBuffer(b)
	for _, of := range f.lrc.Bases(rg, h.owner) {
		buf := b[:of.Range.Bytes()]
		if of.Base == lrc.BaseHome {
			if err := f.readHomeLocked(of.Range, buf); err != nil {
				return err
			}
		}
		for i := of.Range.Start; of.Base != lrc.BaseHome && i < of.Range.End; i++ {
			base := f.bases.at(i, of.Base)
			if base == nil {
				return missingBase(i)
			}
			copy(buf[(i-of.Range.Start).Offset():], base[:])
		}
		if err := h.dev.moves.In(ctx, mover.Acquire, h.copies(of.Range, buf)); err != nil {
			return err
		}
		h.rebaseLocked(of.Range, buf)
	}
	return nil
}

// loseStoresLocked makes the device give up rg. Programs may go on storing there.
func (p *groupPart) loseStoresLocked(ctx context.Context, rg page.Range) {
	h := p.h
	if h.giveUpLocked(ctx, rg) != nil {
		return // the device is lost, or the pages are littered
	}
	for _, w := range h.writersLocked(rg) {
		if w.track {
			h.hollowLocked(w.pages)
		}
	}
}
