package pagecache

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"sync"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// A view is a copy of home, in a layout of its own. No program may store into it, so lrc does not know of it. Every
// change of home marks the pages as stale in the views of the file (spoilLocked), and acquiring a view copies the stale
// pages. Released pages that home does not have yet are copied straight from their devices if possible
// (viewstraight.go); otherwise they are brought home first.
//
// A fill reads home without File.mu. It takes the stale pages under File.mu. So it reads everything that changed
// before, and pages that change later are stale again. Each view has one fill at a time: a caller that finds nothing
// stale may rely on the bytes.

// View is device memory with chosen bytes of files. Clients map it through ViewMappings. It outlives them until the
// memory is needed or a file is gone.
type View struct {
	c      *Cache       // immutable
	dev    *device      // immutable
	key    viewKey      // immutable
	layout *view.Layout // immutable
	parts  []*viewPart  // of the files that the view has bytes of; immutable
	files  []*File      // the files of parts; immutable
	host   int64        // bytes of host memory that the view is charged for; immutable
	user   uint32       // immutable

	users int    // ViewMappings, and calls of OpenView. Protected by Cache.mu
	used  uint64 // Cache.viewUses when the last user left. Protected by Cache.mu

	// filling has an element while a fill is going on.
	filling chan struct{}

	mu       sync.Mutex
	extents  []*residency.Extent       // in the order of their pages; protected by mu
	mappings map[*ViewMapping]struct{} // protected by mu
}

// viewPart is the part of a view that comes from one file.
type viewPart struct {
	v     *View
	f     *File
	of    *view.File
	state *view.State
	// straight has the pages that were copied straight from devices. Protected by File.mu.
	straight straight
	// shares is the fill to which other fills may bring pages. Protected by fileViews.mu.
	shares *viewFill
}

// viewKey identifies a view. Users do not share a view, because on some devices a program may store into the memory
// that it was given, and keeps that memory. When rights to a file are taken away, later programs do not share a view
// with earlier ones.
type viewKey struct {
	device int
	user   uint32
	what   [sha256.Size]byte
}

// newViewKey returns the key of a view of files. It reads their rights. The caller keeps the files attached.
func newViewKey(ctx context.Context, c *Cache, dev *device, req ViewRequest, files []*File) (viewKey, error) {
	k := viewKey{device: dev.info.Ordinal, user: req.User}
	if c.trustUsers {
		k.user = 0
	}
	h := sha256.New()
	var b []byte
	add := func(numbers ...uint64) {
		b = b[:0]
		for _, n := range numbers {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
		h.Write(b)
	}
	add(uint64(req.Alignment), uint64(len(files)))
	for _, f := range files {
		if err := f.mu.LockIn(ctx); err != nil {
			return k, err
		}
		_, err := f.noteRightsLocked()
		taken := f.taken
		f.mu.Unlock()
		if err != nil {
			return k, err
		}
		add(f.serial, taken)
	}
	for _, s := range req.Segments {
		add(uint64(s.File), uint64(s.Offset), uint64(s.Length), uint64(s.Stride), uint64(s.Count))
	}
	h.Sum(k.what[:0])
	return k, nil
}

// joinView returns the view with this key and adds a user to it; leave takes the user back. It makes the view if there
// is none. The caller keeps the files attached.
func (c *Cache) joinView(dev *device, key viewKey, user uint32, files []*File, layout *view.Layout) (*View, error) {
	c.mu.Lock()
	if v := c.viewsByKey[key]; v != nil {
		v.users++
		c.mu.Unlock()
		return v, nil
	}
	c.mu.Unlock()
	v := &View{
		c: c, dev: dev, key: key, layout: layout, users: 1, user: user, host: layout.Memory(),
		filling: make(chan struct{}, 1), mappings: make(map[*ViewMapping]struct{}),
	}
	c.memory.charge(memoryViews, v.host) // before the limit is checked: concurrent requests see each other
	if v.host > leastList && !c.makeRoom(0) {
		c.memory.charge(memoryViews, -v.host)
		return nil, fail(syscall.ENOMEM,
			"the list of the view's segments takes %s of host memory, of which %s are left; use fewer "+
				"segments, or mount with a larger --host-memory", humanize.IBytes(uint64(v.host)),
			humanize.IBytes(uint64(c.memory.left())))
	}
	for i, f := range files {
		if of := layout.File(i); !of.Span().Empty() {
			p := &viewPart{v: v, f: f, of: of, state: view.NewState(of)}
			v.parts, v.files = append(v.parts, p), append(v.files, f)
		}
	}
	for _, p := range v.parts {
		p.f.views.add(p)
	}
	c.mu.Lock()
	other := c.viewsByKey[key]
	if other == nil {
		c.viewsByKey[key] = v
	} else {
		other.users++
	}
	c.mu.Unlock()
	if other != nil {
		for _, p := range v.parts {
			p.f.views.remove(p)
		}
		c.memory.charge(memoryViews, -v.host)
		return other, nil
	}
	return v, nil
}

// leastList is the size of a list of segments up to which a view is made even if --host-memory is full. Other work may
// have filled it. Each view takes an extent of device memory, so there are few.
const leastList = page.Size

// leave takes a user of the view back, and drops the view if it has no memory, its device is lost, or it is unneeded.
// Files that nothing else uses are detached. It blocks on the files.
func (v *View) leave(ctx context.Context, unneeded bool) {
	v.c.mu.Lock()
	v.users--
	v.c.viewUses++
	v.used = v.c.viewUses
	v.c.mu.Unlock()
	if unneeded || v.empty() || v.dev.lost.Load() {
		v.drop()
	}
	for _, p := range v.parts {
		p.f.whenFree(ctx, p.f.dropIdleLocked)
	}
}

// empty reports whether the view has no memory.
func (v *View) empty() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.extents) == 0
}

// drop forgets the view and frees its memory, unless it is in use or already dropped.
func (v *View) drop() (freed int64, dropped bool) {
	if !v.forget() {
		return 0, false
	}
	freed = v.free()
	if len(v.parts) > 1 { // the files of the other parts may have no other use
		v.dropEmptyBeside()
	}
	return freed, true
}

// forget makes nobody find the view any more and gives its host memory back, unless the view is in use or forgotten
// already. The caller frees its memory.
func (v *View) forget() bool {
	c := v.c
	c.mu.Lock()
	idle := v.users == 0 && c.viewsByKey[v.key] == v
	if idle {
		delete(c.viewsByKey, v.key)
	}
	c.mu.Unlock()
	if !idle {
		return false
	}
	for _, p := range v.parts {
		p.f.views.remove(p)
	}
	c.memory.charge(memoryViews, -v.host)
	return true
}

// free frees the memory of a forgotten view.
func (v *View) free() (freed int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.extents {
		freed += x.Size()
		x.Leave(v.dev.lost.Load())
	}
	v.extents = nil
	return freed
}

// dropEmptyBeside drops the unused views without memory of the view's files, and the files that nothing uses, in the
// background.
func (v *View) dropEmptyBeside() {
	for _, p := range v.parts {
		v.c.lanes.do(p.f, choreViews, func() {
			p.f.views.dropEmpty()
			p.f.mu.Lock()
			defer p.f.mu.Unlock()
			p.f.dropIdleLocked()
		})
	}
}

// letGo gives up the extents of the view on a lost device.
func (v *View) letGo() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.extents {
		v.staleIn(x) // for views that follow this one
		x.Leave(true)
	}
	v.extents = nil
}

// Extents implements residency.Key. Pages are pages of the view.
func (v *View) Extents(rg page.Range) (list []*residency.Extent) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.extents {
		if x.Pages().Overlaps(rg) {
			list = append(list, x)
		}
	}
	return list
}

// Adopt implements residency.Key.
func (v *View) Adopt(x *residency.Extent) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	i, _ := slices.BinarySearchFunc(v.extents, x, func(a,
		b *residency.Extent) int {
		return int(a.Pages().End - b.Pages().End)
	})
	for _, other := range v.extents[max(i-1, 0):min(i+2, len(v.extents))] {
		if other.Pages().Overlaps(x.Pages()) {
			return false
		}
	}
	v.extents = slices.Insert(v.extents, i, x)
	return true
}

// Clean implements residency.Key. Home has all bytes of the view, so there is nothing to write and nobody to wait for.
// The next mapping of the view fills the extent again.
func (v *View) Clean(_ context.Context, x *residency.Extent, copied bool) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	i := slices.Index(v.extents, x)
	if i < 0 || !copied && x.Copied() {
		return false
	}
	v.staleIn(x) // for the next mapping
	if !x.Leave(false) {
		return false
	}
	v.extents = slices.Delete(v.extents, i, i+1)
	v.c.counters.Evictions.Add(1)
	if len(v.extents) == 0 {
		v.dropEmptyBeside()
	}
	return true
}

// Rehouse does nothing: the memory of views does not move.
func (v *View) Rehouse(context.Context, *residency.Extent, residency.Tier, gpubackend.Memory) bool {
	return false
}

// Pinned implements residency.Key. A view is pinned if one of its files is.
func (v *View) Pinned() (by residency.Tenant, pinned bool) {
	for _, f := range v.files {
		if by, pinned := f.pinnedOn(v.dev); pinned {
			return by, true
		}
	}
	return by, false
}

// Preference implements residency.Key. A view has the highest priority among its files, and does not move.
func (v *View) Preference() residency.Preference {
	priority := math.MinInt
	for _, f := range v.files {
		priority = max(priority, f.preference().Priority)
	}
	return residency.Preference{Priority: priority}
}

// staleIn marks the pages as stale whose bytes are in x.
func (v *View) staleIn(x *residency.Extent) {
	stale := make(map[int]*view.State, len(v.parts))
	for _, p := range v.parts {
		stale[p.of.Number()] = p.state
	}
	for i, b := range v.layout.Sources(page.Span(x.Pages().Offset(), x.Size())) {
		stale[i].Mark(b.Pages())
	}
}

// snapshotMappings returns the mappings of the view.
func (v *View) snapshotMappings() []*ViewMapping {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Collect(maps.Keys(v.mappings))
}
