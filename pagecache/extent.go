package pagecache

import (
	"cmp"
	"context"
	"errors"
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// extentsPerFile bounds the number of extents that a file is cut into when it is first mapped on a device: each costs
// a descriptor and 0.2 ms here, and up to 0.6 ms in every client that maps the file. A file that is larger than the device
// is mapped in parts, a window at a time, and is cut into extentsPerDevice for each time that the device's memory goes into it,
// so that a small window does not take much of the device.
const (
	extentsPerFile   = 32
	extentsPerDevice = 256
)

// extent is device memory that caches the bytes [index·size, (index+1)·size) of a file.
type extent struct {
	file  *File
	h     *holding
	dev   *device
	index int64
	size  int64
	mem   gpubackend.Memory

	// users are the holding, and copies under way: the last one frees the memory.
	users atomic.Int32
	// mapped counts the mappings that cover the extent. Protected by File.mu.
	mapped int
	// pins has how many of these mappings each user has. Protected by File.mu.
	pins map[uint32]int
	// writable says that a client was given the memory for writing: then programs may store into any page of it whenever they
	// like, whatever they mapped and released. doubtful says that digests were taken from the device's bytes after that, which
	// need not be home's. Both last as long as the extent, and are protected by File.mu.
	writable, doubtful bool
	// given has the users who were given the memory and may have it still. Protected by File.mu.
	given map[uint32]given
	// littered says that something may be left in pages that the device does not hold, by a transfer that failed. Otherwise they
	// have zeros, but for what a client stored who was given the memory for writing. Protected by File.mu.
	littered bool
	// agreed has the digest of every tracked page's base; nil while all of these are zeros, as are those it has not.
	// Protected by File.mu, but that the digests do not change while scans counts somebody who reads them without it:
	// then who wants to change one replaces the array.
	agreed *digests
	scans  int
}

func (x *extent) pages() page.Range { return extentPages(x.index, x.size) }

// span returns the bytes of the file that x caches.
func (x *extent) span() page.Bytes { return page.Span(x.index*x.size, x.size) }

// Memory returns where the bytes are.
func (x *extent) Memory() gpubackend.Memory { return x.mem }

// off returns where page p of the file is in the memory, offset where byte off is.
func (x *extent) off(p page.Index) int64 { return x.offset(p.Offset()) }
func (x *extent) offset(off int64) int64 { return off - x.index*x.size }

// extentPages returns the pages of extent k where extents have size bytes. Their bytes may end at 2^63, so offsets are not added.
func extentPages(k, size int64) page.Range {
	n := page.Count(size)
	return page.Range{Start: page.Index(k) * n, End: page.Index(k+1) * n}
}

// holding is what one device holds of a file. Of users who must not share memory it has one for each (sharing.go). Protected by
// File.mu.
type holding struct {
	dev        *device
	owner      versions.Owner // immutable
	extentSize int64          // immutable
	extents    map[int64]*extent
	// lost has extents of a lost device that clients still map: their memory goes, and with it the descriptors that they may
	// be being sent, when those have ended.
	lost []*extent
	// reads are those of home that go on without File.mu.
	reads homeReads
}

func (h *holding) empty() bool { return len(h.extents) == 0 }

// has reports whether x is one of h's still.
func (h *holding) has(x *extent) bool { return h.extents[x.index] == x }

func (h *holding) sorted() []*extent {
	list := make([]*extent, 0, len(h.extents))
	for _, x := range h.extents {
		list = append(list, x)
	}
	slices.SortFunc(list, func(a, b *extent) int { return cmp.Compare(a.index, b.index) })
	return list
}

// each calls fn for the part of rg in each extent that exists, in order.
func (h *holding) each(rg page.Range, fn func(x *extent, part page.Range)) {
	if rg.Len()/(h.extentSize>>page.Shift) > 2*int64(len(h.extents)) { // a mapping may be of the far end of a sparse file
		for _, x := range h.sorted() {
			if part := rg.Intersect(x.pages()); !part.Empty() {
				fn(x, part)
			}
		}
		return
	}
	of := walk{h: h}
	of.each(rg, fn)
}

// walk looks for the extents of pages, of which many in a row are in the same one. Nobody adds or frees extents meanwhile.
type walk struct {
	h     *holding
	x     *extent    // that of pages, nil if there is none
	pages page.Range // none at first
}

// at returns the extent of page p, nil if there is none, and its pages.
func (w *walk) at(p page.Index) (*extent, page.Range) {
	if !w.pages.Contains(p) {
		k := w.h.indexOf(p)
		w.x, w.pages = w.h.extents[k], extentPages(k, w.h.extentSize)
	}
	return w.x, w.pages
}

// each is that of holding. It takes no longer for a range that has more extents than the device has of the file.
func (w *walk) each(rg page.Range, fn func(x *extent, part page.Range)) {
	if rg.Empty() {
		return
	}
	if w.h.indexOf(rg.End-1)-w.h.indexOf(rg.Start) > int64(len(w.h.extents)) {
		for _, x := range w.h.sorted() {
			if part := x.pages().Intersect(rg); !part.Empty() {
				fn(x, part)
			}
		}
		return
	}
	for p := rg.Start; p < rg.End; {
		x, pages := w.at(p)
		end := min(rg.End, pages.End)
		if x != nil {
			fn(x, page.Range{Start: p, End: end})
		}
		p = end
	}
}

// indexOf returns the number of the extent that page p belongs to.
func (h *holding) indexOf(p page.Index) int64 { return int64(p / page.Count(h.extentSize)) }

// covers reports whether all of rg has memory.
func (h *holding) covers(rg page.Range) bool {
	pages := int64(0)
	h.each(rg, func(_ *extent, part page.Range) { pages += part.Len() })
	return pages == rg.Len()
}

// at returns the extent of page p and the byte offset of p in it.
func (h *holding) at(p page.Index) (*extent, int64) {
	x := h.extents[h.indexOf(p)]
	if x == nil {
		return nil, 0
	}
	return x, x.off(p)
}

// copies returns the device copies between the pages of rg and buf, which has rg.Bytes() bytes.
func (h *holding) copies(rg page.Range, buf []byte) []gpubackend.Copy {
	return h.appendCopies(nil, rg, buf)
}

// appendCopies appends them to pieces.
func (h *holding) appendCopies(pieces []gpubackend.Copy, rg page.Range, buf []byte) []gpubackend.Copy {
	of := walk{h: h}
	return of.appendCopies(pieces, rg, buf)
}

// appendCopies is that of holding.
func (w *walk) appendCopies(pieces []gpubackend.Copy, rg page.Range, buf []byte) []gpubackend.Copy {
	w.each(rg, func(x *extent, part page.Range) {
		from := (part.Start - rg.Start).Offset()
		pieces = append(pieces, gpubackend.Copy{
			Mem:  x.Memory(),
			Off:  x.off(part.Start),
			Host: buf[from : from+part.Bytes()],
		})
	})
	return pieces
}

// agreedAt returns the agreed digests of the pages of part, which lie in x, for reading.
func (x *extent) agreedAt(part page.Range) []gpubackend.Digest {
	if x.agreed == nil {
		x.agreed = newDigests(&x.file.c.memory, x.size>>page.Shift, x.dev.zeros[0])
	}
	first := x.pages().Start
	return x.agreed.take(part.Start-first, part.End-first)
}

// agreeOn is agreedAt for changing them.
func (x *extent) agreeOn(part page.Range) []gpubackend.Digest {
	if x.scans > 0 {
		shared := x.agreed
		x.agreed, x.scans = shared.clone(), 0
		shared.drop()
	}
	return x.agreedAt(part)
}

// agreeOn sees to it that there are digests of all pages of updates, and that nobody reads them without File.mu.
func (h *holding) agreeOn(updates []lrc.Update) {
	of := walk{h: h}
	for _, u := range updates {
		of.each(u.Range, func(x *extent, part page.Range) { x.agreeOn(part) })
	}
}

// extentSize chooses the size of a file's extents on a device: the device's granularity for small files, and for large
// ones the power-of-two multiple of it that makes at most extentsPerFile of them. Where the file would go into the device's
// memory but for what is left over in the last extent, they are smaller.
func extentSize(info gpubackend.Info, bytes int64) int64 {
	size, want := info.Granularity, bytes/extentsPerFile
	if bytes > info.Memory {
		want = info.Memory / extentsPerDevice
	}
	if want > size {
		size = 1 << bits.Len64(uint64(want-1))
	}
	fits := func() bool { return (bytes+size-1)&^(size-1) <= info.Memory }
	for size > info.Granularity && (size > info.Memory/8 || bytes <= info.Memory && !fits()) {
		size >>= 1
	}
	return size
}

// newHoldingLocked makes one more holding of a device, for a file that will be mapped up to end.
func (f *File) newHoldingLocked(dev *device, end int64) (*holding, error) {
	owner, err := f.freeOwnerLocked(dev)
	if err != nil {
		return nil, err
	}
	h := &holding{
		dev:        dev,
		owner:      owner,
		extentSize: extentSize(dev.info, max(f.size, end)),
		extents:    make(map[int64]*extent),
	}
	f.holdings[owner] = h
	if owner != dev.owner {
		f.others = append(f.others, h)
	}
	return h, nil
}

// reserve makes sure that every page of rg has memory of h, pinned by one more mapping. The caller holds no lock. When
// the device is full, the least recently allocated extents that no client maps make room. On failure nothing is pinned.
func (c *Cache) reserve(ctx context.Context, f *File, h *holding, rg page.Range, by pinner) error {
	dev, first, last := h.dev, h.indexOf(rg.Start), h.indexOf(rg.End-1)
	if n := last - first + 1; n > dev.info.Memory/h.extentSize {
		return fail(syscall.ENOMEM, "the mapping needs %s on device %d, whose budget is %s; map less, or mount with a larger --gpu-memory",
			humanize.IBytes(uint64(n)*uint64(h.extentSize)), dev.info.Ordinal, humanize.IBytes(uint64(dev.info.Memory)))
	}
	if last == math.MaxInt64/h.extentSize {
		// The extent ends at 2^63, which is no offset any more, here and in every client.
		return fail(syscall.EOVERFLOW, "the last %s that a file can have cannot be mapped", humanize.IBytes(uint64(h.extentSize)))
	}
	for k := first; k <= last; k++ {
		if err := c.pin(ctx, f, h, k, by); err != nil {
			f.mu.Lock()
			f.unpinLocked(h, page.Range{Start: extentPages(first, h.extentSize).Start, End: extentPages(k, h.extentSize).Start}, by.user)
			f.mu.Unlock()
			return err
		}
	}
	return nil
}

// pin counts one more mapping of extent k, which it allocates where it does not exist.
func (c *Cache) pin(ctx context.Context, f *File, h *holding, k int64, by pinner) error {
	f.mu.Lock()
	if x := h.extents[k]; x != nil {
		defer f.mu.Unlock()
		return f.pinLocked(x, by)
	}
	f.mu.Unlock()

	if err := c.charge(h.dev, by, h.extentSize); err != nil {
		return err
	}
	charged := true
	defer func() {
		if charged {
			c.discharge(h.dev, by.user, h.extentSize)
		}
	}()
	mem, err := c.allocate(ctx, h.dev, h.extentSize)
	if err != nil {
		return err
	}
	// Memory may hold what another file left in it, and a client can reach every byte of an extent.
	if !mem.Zeroed() {
		if err := h.dev.Zero(ctx, mem, 0, h.extentSize); err != nil {
			_ = mem.Free()
			c.lose(h.dev, err)
			return h.dev.fault(err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if x := h.extents[k]; x != nil {
		_ = mem.Free()
		return f.pinLocked(x, by)
	}
	x := &extent{file: f, h: h, dev: h.dev, index: k, size: h.extentSize, mem: mem, mapped: 1, pins: map[uint32]int{by.user: 1}}
	charged = false
	x.users.Store(1)
	h.extents[k] = x
	c.mu.Lock()
	h.dev.extents = append(h.dev.extents, x)
	c.mu.Unlock()
	return nil
}

// unpinLocked takes back one pin of each extent of rg.
func (f *File) unpinLocked(h *holding, rg page.Range, user uint32) {
	h.each(rg, func(x *extent, _ page.Range) { f.unpinExtentLocked(x, user) })
	h.lost = slices.DeleteFunc(h.lost, func(x *extent) bool {
		if x.pages().Intersect(rg).Empty() {
			return false
		}
		if f.unpinExtentLocked(x, user); x.mapped > 0 {
			return false
		}
		f.freeMemory(x)
		return true
	})
}

// allocate returns memory of dev, evicting until there is room. Extents that nobody maps but that are being copied for CPU reads go
// last. No copy of them begins once they are evicted, and those under way are waited for, though not for longer than a
// read waits.
func (c *Cache) allocate(ctx context.Context, dev *device, size int64) (gpubackend.Memory, error) {
	c.evictMu.Lock()
	defer c.evictMu.Unlock()
	var patience <-chan time.Time
	for {
		// Before Alloc: what goes after that says so in freed, and what leaves after that is looked for again.
		leaving, left := dev.leaving.Load() > 0, dev.left.Load()
		mem, err := dev.Alloc(size)
		if err == nil {
			return mem, nil
		}
		if c.lose(dev, err) {
			return nil, dev.gone()
		}
		if !errors.Is(err, gpubackend.ErrNoMemory) {
			return nil, err
		}
		evicted, err := c.evictOne(ctx, dev, false)
		if err == nil && !evicted && !leaving {
			evicted, err = c.evictOne(ctx, dev, true)
		}
		switch {
		case err != nil:
			return nil, err
		case evicted, dev.left.Load() != left:
			continue
		case !leaving && !c.kept(dev):
			return nil, dev.full(size)
		}
		var again <-chan time.Time
		if !leaving {
			// A client that unmapped memory, or that ended, may be giving it back this moment.
			again = time.After(keptTick)
		}
		if patience == nil {
			patience = time.After(c.patience(mostPatience))
		}
		select {
		case <-dev.freed:
		case <-again:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-patience:
			if !leaving {
				return nil, dev.full(size)
			}
			return nil, fail(syscall.ENOMEM,
				"device %d is full: memory that could make room is still being copied from for programs on the CPU; the device is slow, or hangs",
				dev.info.Ordinal)
		}
	}
}

// keptTick is how often a device is asked whether clients gave memory back that they had unmapped.
const keptTick = 2 * time.Millisecond

// kept reports whether clients keep memory of dev that they have unmapped and that was freed.
func (c *Cache) kept(dev *device) bool {
	used := dev.Used()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range dev.extents {
		used -= x.size
	}
	return used > 0
}

// full is why there is no memory where nothing can make room.
func (d *device) full(size int64) error {
	if used := d.Used(); used+size <= d.info.Memory {
		return fail(syscall.ENOMEM,
			"device %d has no memory left although only %s of its %s are used here: other programs use the GPU's memory; end one of them, or mount with a smaller --gpu-memory",
			d.info.Ordinal, humanize.IBytes(uint64(used)), humanize.IBytes(uint64(d.info.Memory)))
	}
	return fail(syscall.ENOMEM,
		"device %d is full: all of its %s are mapped by clients, kept by clients that unmapped it, or hold bytes that cannot be written back; unmap something, or mount with a larger --gpu-memory",
		d.info.Ordinal, humanize.IBytes(uint64(d.info.Memory)))
}

// evictOne evicts the least recently allocated extent of dev that no client maps, after bringing home what was released
// of it. copied says that it may be one that is being copied, whose memory goes when that has ended. It reports false where
// there is none.
func (c *Cache) evictOne(ctx context.Context, dev *device, copied bool) (bool, error) {
	c.mu.Lock()
	candidates := slices.Clone(dev.extents)
	c.mu.Unlock()
	for _, x := range candidates {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		if x.file.evictUnlessStuck(ctx, x, copied) {
			return true, nil
		}
	}
	return false, nil
}

// evictUnlessStuck is evict of a file that answers. Where it turns out that the file does not, evict goes on by itself and the
// answer is false: the next file makes room instead.
func (f *File) evictUnlessStuck(ctx context.Context, x *extent, copied bool) bool {
	if f.stuck() {
		return false
	}
	evicted := make(chan bool, 1)
	f.c.lanes.work.Go(func() { evicted <- f.evict(ctx, x, copied) })
	tick := time.NewTicker(max(f.c.stuckAfter/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case is := <-evicted:
			return is
		case <-tick.C:
			if f.stuck() {
				return false
			}
		}
	}
}

// evict takes x from f if nobody maps it, what it holds can be brought home and, unless copied says otherwise, no copy of it is
// under way. The memory is free once there is none.
func (f *File) evict(ctx context.Context, x *extent, copied bool) bool {
	idle := func() bool {
		return x.mapped == 0 && (copied || x.users.Load() == 1) && x.h.has(x)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	// Most of it comes home a part at a time, so that requests get in between.
	for rest := x.pages(); idle() && !f.orphan && !rest.Empty(); {
		var err error
		if rest.Start, err = f.collectSomeLocked(ctx, rest); err != nil {
			return false
		}
		f.mu.Unlock()
		f.mu.Lock()
	}
	if !idle() {
		return false
	}
	if !f.orphan {
		if len(f.lrc.Draining(x.pages())) > 0 {
			return false
		}
		if err := f.collectLocked(ctx, x.pages(), false); err != nil {
			return false
		}
	}
	f.freeExtentLocked(x)
	f.count(func(c *Counters) { c.Evictions.Add(1) })
	f.dropIdleLocked()
	return true
}

// freeExtentLocked gives the memory of x back. Whatever was pending in it is lost.
func (f *File) freeExtentLocked(x *extent) {
	h := x.h
	if !h.has(x) {
		return
	}
	delete(h.extents, x.index)
	x.agreed.drop()
	x.agreed = nil
	x.dev.leaving.Add(1)
	x.dev.left.Add(1)
	f.dropBasesLocked(f.lrc.Evicted(x.pages(), h.owner))
	f.c.mu.Lock()
	if i := slices.Index(x.dev.extents, x); i >= 0 {
		x.dev.extents = slices.Delete(x.dev.extents, i, i+1)
	}
	f.c.mu.Unlock()
	if x.dev.lost.Load() && x.mapped > 0 {
		h.lost = append(h.lost, x)
		return
	}
	f.freeMemory(x)
}

// freeMemory is what each user of x calls once.
func (f *File) freeMemory(x *extent) {
	if x.users.Add(-1) > 0 {
		return
	}
	if err := x.Memory().Free(); err != nil {
		f.c.log.Warn("freeing device memory", "device", x.dev.info.Ordinal, "error", err)
	}
	x.dev.leaving.Add(-1)
	select {
	case x.dev.freed <- struct{}{}:
	default:
	}
}
