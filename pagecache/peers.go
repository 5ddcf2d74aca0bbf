package pagecache

import (
	"context"
	"errors"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/versions"
)

// leastPeer is the shortest run of pages that is copied from another device, 64 KiB. Many shorter runs come faster from
// home's page cache.
const leastPeer = 16

// devicePair is the path from one device's memory to another's.
type devicePair struct{ to, from versions.Owner }

// A device may get another device's copy of a page instead of home's if that copy is exactly home's bytes:
//
//   - the copy has every release that home has and no other (lrc.Current), and
//   - no program can have stored into it: it is not tracked, and no client was ever given its extent for writing. Or
//     the arrived copy has the digest that the source agreed on with home. Nobody stores into the arrived copy, so
//     stores into the source during the copy do no harm: the digest differs, and the page is fetched from home instead.
//     The two devices must have the same key.
//
// No program may be storing into the destination either, because nobody has the bytes that such stores would mix with.

// fromPeersLocked copies those updates in part that other devices can provide; stale lists the updates. storing covers
// part and tells where programs may be storing. It returns the number of pages copied and the page up to which it
// looked.
func (f *File) fromPeersLocked(ctx context.Context, h *holding, part page.Range, stale []lrc.Update, storing []tracking,
	plan lrc.AcquirePlan) (
	pages int64, next page.Index, err error,
) {
	next = part.End
	sources := f.peersLocked(h)
	if len(sources) == 0 {
		return 0, next, nil
	}
	var want []page.Range
	for _, u := range stale {
		if u.Mode != lrc.ModePatch {
			want = page.AppendRange(want, u.Range)
		}
	}
	var quiet []page.Range
	for _, s := range storing {
		if !s.track {
			quiet = append(quiet, s.pages)
		}
	}
	want = atLeast(intersect(want, quiet), f.c.leastPeer)
	for _, source := range sources {
		d := source.dev
		unwritten, written := f.sourcesLocked(source, h, part)
		for i, from := range [][]page.Range{unwritten, written} {
			take, end := limit(atLeast(intersect(want, from), f.c.leastPeer), holdPeer-pages)
			next = min(next, end)
			if len(take) == 0 {
				continue
			}
			arrived, err := f.copyPeerLocked(ctx, h, source, take, i == 1, plan)
			if f.c.noteWay(h.dev, d, err) {
				break
			}
			if err != nil {
				return pages, next, err
			}
			want = subtract(want, take)
			pages += pagesOf(arrived)
		}
	}
	return pages, next, nil
}

// peersLocked returns the other holdings with pages of the file from which the device of h can copy.
func (f *File) peersLocked(h *holding) (sources []*holding) {
	for source := range f.holdersLocked() {
		if source != h && !source.empty() && f.c.reaches(h.dev, source.dev) {
			sources = append(sources, source)
		}
	}
	return sources
}

// reaches reports whether one device can copy from another, as far as is known.
func (c *Cache) reaches(to, from *device) bool {
	if from.info.Kind != to.info.Kind || from.lost.Load() {
		return false
	}
	_, no := c.noPeer.Load(devicePair{to.owner, from.owner})
	return !no
}

// noteWay reports whether err of a copy between devices says that there is no path between them. If so, such copies are
// not tried again.
func (c *Cache) noteWay(to, from *device, err error) bool {
	if !errors.Is(err, gpubackend.ErrNoPeer) {
		return false
	}
	c.log.Info("one device cannot copy from another; bytes go through the host",
		"to", to.info.Ordinal, "from", from.info.Ordinal, "error", err)
	c.noPeer.Store(devicePair{to.owner, from.owner}, true)
	return true
}

// openPaths copies a little to a device from each other one. The first copy between two devices takes longer, because
// the driver opens the path.
func (c *Cache) openPaths(ctx context.Context, to *device) {
	for _, from := range c.devices {
		if from == to || !c.reaches(to, from) {
			continue
		}
		if err := openPath(ctx, to, from, to.info.Granularity); !c.noteWay(to, from, err) && err != nil {
			c.log.Debug("the path between two devices is not open yet", "to", to.info.Ordinal,
				"from", from.info.Ordinal, "error", err)
		}
	}
}

// openPath allocates n bytes on each of two devices, and copies them.
func openPath(ctx context.Context, to, from *device, n int64) error {
	source, err := from.AllocStaging(n)
	if err != nil {
		return err
	}
	defer func() { _ = source.Free() }() // it fails for a lost device
	mem, err := to.AllocStaging(n)
	if err != nil {
		return err
	}
	defer func() { _ = mem.Free() }()
	return to.moves.OpenPath(ctx, mem, source)
}

// sourcesLocked returns the pages of part for which source has home's bytes: those that no program stores into, and
// those whose copies must be compared with the agreed digest.
func (f *File) sourcesLocked(source, h *holding, part page.Range) (unwritten, written []page.Range) {
	for _, c := range f.lrc.Current(part, source.owner) {
		if c.Tracked {
			written = page.AppendRange(written, c.Range)
		} else {
			unwritten = page.AppendRange(unwritten, c.Range)
		}
	}
	source.each(part, func(x *extent, rg page.Range) {
		if x.writable {
			unwritten = page.Subtract(unwritten, rg)
		}
		if x.doubtful {
			written = page.Subtract(written, rg)
		}
	})
	if *source.dev.Key() != *h.dev.Key() {
		written = nil
	}
	return unwritten, written
}

// copyPeerLocked copies ranges from one device to another and returns the pages that arrived with home's bytes. Without
// compare these are all. With compare, it checks the copies against the digests that the source agreed on.
func (f *File) copyPeerLocked(ctx context.Context, h, source *holding, ranges []page.Range, compare bool,
	plan lrc.AcquirePlan) (arrived []page.Range, err error) {
	var pieces []gpubackend.PeerCopy
	for _, rg := range ranges {
		h.each(rg, func(x *extent, to page.Range) {
			source.each(to, func(y *extent, from page.Range) {
				pieces = append(pieces, gpubackend.PeerCopy{
					Mem: x.Memory(), Off: x.off(from.Start),
					From: y.Memory(), FromOff: y.off(from.Start), N: from.Bytes(),
				})
			})
		})
	}
	if err := h.dev.moves.Peer(ctx, mover.Acquire, pieces); err != nil {
		h.litter(ranges)
		return nil, err
	}
	arrived = ranges
	if compare {
		if arrived, err = f.comparedLocked(ctx, h, source, ranges); err != nil {
			return nil, err
		}
		h.litter(subtract(ranges, arrived))
	}
	f.dropBasesLocked(plan.Updated(arrived, false))
	n := pagesOf(arrived)
	f.count(func(c *Counters) { c.PeerCopies.Add(1); c.PeerCopyPages.Add(n) })
	return arrived, nil
}

// comparedLocked returns the pages of ranges that have, on the device of h, the digests that source agreed on.
func (f *File) comparedLocked(ctx context.Context, h, source *holding,
	ranges []page.Range) (same []page.Range, err error) {
	var scans []gpubackend.Scan
	var parts []page.Range
	for _, rg := range ranges {
		h.each(rg, func(x *extent, to page.Range) {
			source.each(to, func(y *extent, from page.Range) {
				scans = append(scans, gpubackend.Scan{Mem: x.Memory(), Off: x.off(from.Start),
					Agreed: y.agreedAt(from)})
				parts = append(parts, from)
			})
		})
	}
	found, err := h.dev.Modified(ctx, scans)
	if err != nil {
		h.litter(ranges)
		return nil, err
	}
	for i, part := range parts {
		for k := range found[i] {
			found[i][k].Start += part.Start
			found[i][k].End += part.Start
		}
		for _, rg := range subtract([]page.Range{part}, found[i]) {
			same = page.AppendRange(same, rg)
		}
	}
	return same, nil
}

// atLeast returns the ranges of n pages or more.
func atLeast(ranges []page.Range, n int64) (out []page.Range) {
	for _, rg := range ranges {
		if rg.Len() >= n {
			out = append(out, rg)
		}
	}
	return out
}

// limit returns the first n pages of ranges. If it leaves some out, end is the first page that it leaves out.
func limit(ranges []page.Range, n int64) (out []page.Range, end page.Index) {
	end = page.Index(1<<63 - 1)
	for _, rg := range ranges {
		if n <= 0 {
			return out, min(end, rg.Start)
		}
		if rg.Len() > n {
			rg.End = rg.Start + page.Index(n)
			end = rg.End
		}
		n -= rg.Len()
		out = append(out, rg)
	}
	return out, end
}
