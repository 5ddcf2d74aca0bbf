package pagecache

import (
	"cmp"
	"context"
	"slices"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Inspection is the report that `gaiafs info` shows of a file. docs/status.md documents its JSON form.
type Inspection struct {
	FileStatus
	// MappedBy lists the live mappings.
	MappedBy []MappingInfo `json:"mapped_by"`
	// Others counts the mappings that the reader may not see. The cache leaves it zero.
	Others int `json:"others"`
}

// MappingInfo is a client's mapping of a part of a file.
type MappingInfo struct {
	Process  uint32 `json:"process"`
	User     uint32 `json:"user"`
	Device   int    `json:"device"`
	Offset   int64  `json:"offset"`
	Bytes    int64  `json:"bytes"`
	Writable bool   `json:"writable"`
	Lazy     bool   `json:"lazy"`
	// View says that it is a mapping of a view with bytes of the file. Offset and Bytes are in the view.
	View bool `json:"view"`
}

// Inspect returns what devices hold of a file, and who maps it. If they hold nothing, only the ID is set. It blocks as
// Status does.
func (c *Cache) Inspect(id FileID) Inspection {
	in := Inspection{FileStatus: FileStatus{ID: id, Holders: []HoldingStatus{}}, MappedBy: []MappingInfo{}}
	f := c.Lookup(id)
	if f == nil {
		return in
	}
	seen := glancesOf([]*File{f})
	if len(seen) == 0 {
		return in
	}
	in.FileStatus = seen[0].FileStatus
	for _, v := range f.views.snapshot() {
		for _, m := range v.snapshotMappings() {
			in.MappedBy = append(in.MappedBy, MappingInfo{Process: m.req.Process, User: m.req.User,
				Device: v.dev.info.Ordinal, Bytes: v.layout.Size(), Lazy: m.req.Lazy, View: true})
		}
	}
	if in.BusySeconds == 0 { // otherwise snapshotMappings would wait, too
		for _, m := range f.snapshotMappings() {
			in.MappedBy = append(in.MappedBy, MappingInfo{m.process, m.user, m.dev.info.Ordinal, m.off, m.len,
				m.writable, m.lazy, false})
		}
	}
	slices.SortFunc(in.MappedBy, func(a, b MappingInfo) int {
		return cmp.Or(cmp.Compare(a.Process, b.Process), cmp.Compare(a.Device, b.Device),
			cmp.Compare(a.Offset, b.Offset))
	})
	return in
}

// Warm fetches a range of a file to a device and returns the number of pages that were not up to date. The pages stay
// until the device needs the room. Warm is Map followed by Unmap, without giving the memory to a client. It ignores
// Writable, Lazy and Launder of the request.
func (c *Cache) Warm(ctx context.Context, src Source, req MapRequest) (pages int64, err error) {
	req.Writable, req.Lazy, req.Launder, req.held = false, false, false, true
	m, err := c.Map(ctx, src, req)
	if err != nil {
		return 0, err
	}
	return m.filled, m.Unmap(ctx)
}

// Verification is the result of comparing a device's copy of a range with home, in pages.
type Verification struct {
	// Equal pages match home by their digests. Different pages should match and do not: the device, its memory or a
	// copy failed, or SOURCE was changed directly during the comparison.
	Equal     int64 `json:"equal_pages"`
	Different int64 `json:"different_pages"`
	// Where lists the first pages that differ, at most mostWhere.
	Where []page.Index `json:"different"`
	// Stale and Dirty pages may differ from home. Tracked pages do differ, and may: programs store into them. Absent
	// pages are not on the device.
	Stale   int64 `json:"stale_pages"`
	Dirty   int64 `json:"dirty_pages"`
	Tracked int64 `json:"tracked_pages"`
	Absent  int64 `json:"absent_pages"`
}

const (
	// verifiedPages is the number of pages that are compared under one hold of File.mu.
	verifiedPages = 256
	// mostWhere bounds Verification.Where.
	mostWhere = 16
)

// Verify compares what a device holds of a range of the file with home. The device computes the digests of its pages,
// the host those of home. It blocks on home and on the device. Errors: EINVAL, ENODEV, and those of home and of the
// device.
func (c *Cache) Verify(ctx context.Context, src Source, ordinal int, off, n int64) (v Verification, err error) {
	dev, err := c.device(0, ordinal, gpubackend.UUID{})
	if err != nil {
		return v, err
	}
	if off < 0 || n < 0 || off%page.Size != 0 || n > mostOffset-off {
		return v, fail(syscall.EINVAL, "%d bytes at %d are not a range of pages", n, off)
	}
	f := c.Lookup(src.ID())
	if f == nil {
		v.Absent = page.Covering(off, n).Len()
		return v, nil
	}
	if err := f.checkHome(ctx); err != nil {
		return v, err
	}
	for rest := page.Covering(off, n); !rest.Empty() && err == nil; {
		if err = ctx.Err(); err == nil {
			rest.Start, err = f.verifySome(ctx, dev, rest, &v)
		}
	}
	return v, err
}

// mostOffset is the largest offset at which a file can end.
const mostOffset = 1<<63 - page.Size

// verifySome compares the first pages of rg, up to next, and adds the counts to v.
func (f *File) verifySome(ctx context.Context, dev *device, rg page.Range,
	v *Verification) (next page.Index, err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return rg.Start, err
	}
	defer f.mu.Unlock()
	part := page.Range{Start: rg.Start, End: min(rg.End, rg.Start+verifiedPages)}
	if part.End, err = f.settleSomeLocked(ctx, part); err != nil {
		return part.Start, err
	}
	held := int64(0)
	for h := range f.holdersLocked() {
		if h.dev != dev {
			continue
		}
		for _, r := range f.lrc.Replicas(part, h.owner) {
			held += r.Range.Len()
			switch {
			case r.Pending:
				v.Dirty += r.Range.Len()
			case r.Stale:
				v.Stale += r.Range.Len()
			default:
				if err := f.compareReplicaLocked(ctx, h, r, v); err != nil {
					return part.Start, err
				}
			}
		}
	}
	v.Absent += max(part.Len()-held, 0)
	return part.End, nil
}

// compareReplicaLocked compares pages of h that should match home.
func (f *File) compareReplicaLocked(ctx context.Context, h *holding, r lrc.Replica, v *Verification) error {
	home := make([]byte, r.Range.Bytes())
	if err := f.readHomeLocked(r.Range, home); err != nil {
		return err
	}
	want := make([]gpubackend.Digest, r.Range.Len())
	h.dev.Key().SumPages(home, want)
	var failed error
	h.each(r.Range, func(x *extent, part page.Range) {
		got := make([]gpubackend.Digest, part.Len())
		if err := h.dev.Digests(ctx, x.Memory(), x.off(part.Start), got); err != nil {
			f.c.lose(h.dev, err)
			failed = cmp.Or(failed, h.dev.fault(err))
			return
		}
		for i, sum := range got {
			p := part.Start + page.Index(i)
			switch {
			case sum == want[p-r.Range.Start]:
				v.Equal++
			case r.Tracked:
				v.Tracked++
			default:
				if v.Different++; len(v.Where) < mostWhere {
					v.Where = append(v.Where, p)
				}
			}
		}
	})
	return failed
}

// Eviction is the result of Evict, in bytes of device memory.
type Eviction struct {
	Freed int64 `json:"freed_bytes"`
	// Mapped memory stays because clients map it. Pinned memory stays until the user PinnedBy unpins the file. Kept
	// memory has bytes that could not be written home.
	Mapped   int64  `json:"mapped_bytes"`
	Pinned   int64  `json:"pinned_bytes"`
	PinnedBy uint32 `json:"pinned_by"`
	Kept     int64  `json:"kept_bytes"`
	Error    string `json:"error,omitempty"` // why Kept memory stays
}

// Evict gives up the memory that a device holds of a file, views included, except what clients map or what is pinned. A
// negative ordinal stands for all devices. Evict first writes home what only a device has. It blocks on home and on the
// device. Errors: ENODEV if there is no such device, and those of ctx.
func (c *Cache) Evict(ctx context.Context, id FileID, ordinal int) (e Eviction, err error) {
	if ordinal >= 0 {
		if _, err := c.device(0, ordinal, gpubackend.UUID{}); err != nil {
			return e, err
		}
	}
	f := c.Lookup(id)
	if f == nil {
		return e, nil
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return e, err
	}
	var all []*extent
	for h := range f.holdersLocked() {
		if ordinal < 0 || h.dev.info.Ordinal == ordinal {
			all = append(all, h.sorted()...)
		}
	}
	f.mu.Unlock()
	pinned := func(x *extent) bool {
		by, is := x.h.Pinned()
		if is {
			e.PinnedBy = by.User
		}
		return is
	}
	for _, x := range all {
		switch {
		case ctx.Err() != nil:
			return e, ctx.Err()
		case x.Mapped() > 0:
			e.Mapped += x.Size()
		case pinned(x):
			e.Pinned += x.Size()
		case f.evictFor(ctx, x, residency.ForSomebody):
			e.Freed += x.Size()
		default:
			e.Kept += x.Size()
		}
	}
	f.evictViews(ordinal, &e)
	if err := f.mu.LockIn(ctx); err != nil {
		return e, err
	}
	defer f.mu.Unlock()
	if e.Kept > 0 && f.backlog.err != nil {
		e.Error = f.backlog.err.Error()
	}
	f.dropIdleLocked()
	return e, nil
}

// evictViews gives up the file's views on a device, or on all devices if ordinal is negative, except mapped and pinned
// ones. It adds their memory to e.
func (f *File) evictViews(ordinal int, e *Eviction) {
	for _, v := range f.views.snapshot() {
		if ordinal >= 0 && v.dev.info.Ordinal != ordinal {
			continue
		}
		bytes := v.memory()
		if by, pinned := v.Pinned(); pinned {
			e.Pinned, e.PinnedBy = e.Pinned+bytes, by.User
		} else if freed, idle := v.drop(); idle {
			e.Freed += freed
		} else {
			e.Mapped += bytes
		}
	}
}
