package control

import (
	"context"
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Device says where a mapping's memory is.
type Device struct {
	// Ordinal is the number that clients name the device by.
	Ordinal int
	// Kind tells the client how to map an extent; the numbers are those of gpubackend.Kind and of the wire.
	Kind uint8
	// UUID names the GPU; zero if the kind has no UUIDs.
	UUID [16]byte
}

// Cache is what the Server needs of the page cache. ForCache makes one from a pagecache.Cache.
type Cache interface {
	// Map lets a client map a range of a file on a device. Its errors wrap a syscall.Errno; their text is shown to the
	// client's user.
	Map(ctx context.Context, src pagecache.Source, req pagecache.MapRequest) (Mapping, error)
	// OpenView does the same for a view of files, but without its bytes: Fill brings them.
	OpenView(ctx context.Context, sources []pagecache.Source, req pagecache.ViewRequest) (ViewMapping, error)
	// BeginGroup opens a group, whose stores are released at once.
	BeginGroup(ctx context.Context, ranges []Range) (Group, error)
	// AwaitVersion waits until one of the ranges' files has a released group of at least that version.
	AwaitVersion(ctx context.Context, ranges []Range, least uint64) error
	// AcquireAll brings ranges up to date, all at the same version of every group.
	AcquireAll(ctx context.Context, ranges []Range, launder bool) (version uint64, pages int64, err error)
	// Use begins a bracket, as pagecache.Cache.Use does. Views need no bracket.
	Use(ctx context.Context, uses []Use, o pagecache.UseOptions) (Bracket, error)
	// Kinds has a bit, 1 << (kind-1), for each kind of memory that the devices have. It does not change.
	Kinds() uint32
}

// Use is a range of a mapping that a bracket uses. Off counts from the start of the mapping.
type Use struct {
	Mapping  Mapping
	Off, Len int64
}

// Bracket is a pagecache.Bracket.
type Bracket interface {
	Kept() bool
	Used(n uint32)
	Done()
}

// Mapping is a client's window on a file. Its methods are those of pagecache.Mapping. They are called from many
// goroutines. Unmap is called once, after every other call has returned.
type Mapping interface {
	Device() Device
	Extents() []pagecache.Extent
	// Movable reports whether the memory comes with brackets, and moves.
	Movable() bool
	Acquire(ctx context.Context, off, n int64, launder bool) (pages int64, err error)
	Release(ctx context.Context, off, n int64) (pages int64, err error)
	// TakePastEnd returns how many pages past the end of the file releases have found stores in since the last call.
	TakePastEnd() int64
	Sync(ctx context.Context, off, n int64, durable bool) error
	Advise(ctx context.Context, off, n int64, a pagecache.Advice) error
	// Abandon says that the client ended without unmapping. Unmap follows.
	Abandon()
	Unmap(ctx context.Context) error
}

// ViewMapping is a client's window on a view. Offsets count from the start of the view.
type ViewMapping interface {
	Mapping
	// Size returns the bytes of the view.
	Size() int64
	// Fill waits until the view is up to date for the first time. If it fails, it may be called again.
	Fill(ctx context.Context) error
}

// Range is a range of a mapping that the Cache made.
type Range struct {
	Of       Mapping
	Off, Len int64
}

// Group is an open group. Its methods are those of pagecache.Group. If one of its mappings ends, the group is aborted.
type Group interface {
	Release(ctx context.Context) (version uint64, pages int64, err error)
	Abort(ctx context.Context)
}

// ForCache returns a Cache that serves clients from c.
func ForCache(c *pagecache.Cache) Cache { return pageCache{c} }

type pageCache struct{ cache *pagecache.Cache }

func (p pageCache) Map(ctx context.Context, src pagecache.Source, req pagecache.MapRequest) (Mapping, error) {
	m, err := p.cache.Map(ctx, src, req)
	if err != nil {
		return nil, err
	}
	return pageMapping{m}, nil
}

func (p pageCache) OpenView(ctx context.Context, sources []pagecache.Source,
	req pagecache.ViewRequest) (ViewMapping, error) {
	m, err := p.cache.OpenView(ctx, sources, req)
	if err != nil {
		return nil, err
	}
	return viewMapping{m}, nil
}

func (p pageCache) Use(ctx context.Context, uses []Use, o pagecache.UseOptions) (Bracket, error) {
	var list []pagecache.Use
	for _, u := range uses {
		if m, ok := u.Mapping.(pageMapping); ok {
			list = append(list, pagecache.Use{Mapping: m.Mapping, Off: u.Off, Len: u.Len})
		}
	}
	b, err := p.cache.Use(ctx, list, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

func (p pageCache) BeginGroup(ctx context.Context, ranges []Range) (Group, error) {
	list := make([]pagecache.GroupRange, len(ranges))
	for i, r := range ranges {
		m, ok := r.Of.(pageMapping)
		if !ok {
			return nil, failure(syscall.EACCES, "a view is read-only, but a group releases stores")
		}
		list[i] = pagecache.GroupRange{Of: m.Mapping, Off: r.Off, Len: r.Len}
	}
	return p.cache.BeginGroup(ctx, list)
}

func (p pageCache) AwaitVersion(ctx context.Context, ranges []Range, least uint64) error {
	return p.cache.AwaitVersion(ctx, windows(ranges), least)
}

func (p pageCache) AcquireAll(ctx context.Context, ranges []Range,
	launder bool) (version uint64, pages int64, err error) {
	return p.cache.AcquireAll(ctx, windows(ranges), launder)
}

// windows converts ranges to the page cache's.
func windows(ranges []Range) []pagecache.AcquireRange {
	list := make([]pagecache.AcquireRange, len(ranges))
	for i, r := range ranges {
		list[i] = pagecache.AcquireRange{Of: r.Of.(interface{ window() pagecache.Window }).window(), Off: r.Off,
			Len: r.Len}
	}
	return list
}

func (p pageCache) Kinds() (kinds uint32) {
	for _, d := range p.cache.Devices() {
		kinds |= 1 << (d.Kind - 1)
	}
	return kinds
}

type pageMapping struct{ *pagecache.Mapping }

func (p pageMapping) Device() Device {
	info := p.Mapping.Device()
	return Device{Ordinal: info.Ordinal, Kind: uint8(info.Kind), UUID: info.UUID}
}

func (p pageMapping) window() pagecache.Window { return p.Mapping }

type viewMapping struct{ *pagecache.ViewMapping }

func (v viewMapping) window() pagecache.Window { return v.ViewMapping }

func (v viewMapping) Device() Device {
	info := v.ViewMapping.Device()
	return Device{Ordinal: info.Ordinal, Kind: uint8(info.Kind), UUID: info.UUID}
}
