package control

import (
	"context"
	"github.com/gaiafs/gaiafs/pagecache"
)

// Device says where a mapping's memory is.
type Device struct {
	// Ordinal is the number that clients name the device by.
	Ordinal int
	// Kind tells the client how to map an extent; the numbers are those of gpubackend.Kind and of the wire.
	Kind uint8
	// UUID names the GPU; zero where the kind has none.
	UUID [16]byte
}

// Cache is what the Server needs of the page cache. ForCache makes one of a pagecache.Cache.
type Cache interface {
	// Map lets a client map a range of a file on a device. Its errors wrap a syscall.Errno, and their text is
	// shown to the client's user.
	Map(ctx context.Context, src pagecache.Source, req pagecache.MapRequest) (Mapping, error)
	// MapView lets a client map a view of files on a device, in the same way.
	MapView(ctx context.Context, sources []pagecache.Source, req pagecache.ViewRequest) (ViewMapping, error)
	// Kinds has a bit, 1 << (kind-1), for each kind of memory among the devices. It does not change.
	Kinds() uint32
}

// Mapping is a client's window on a file, with the meaning of the methods of pagecache.Mapping. They are called
// from many goroutines; Unmap is called once, after every other call has returned.
type Mapping interface {
	Device() Device
	Extents() []pagecache.Extent
	Acquire(ctx context.Context, off, n int64, launder bool) (pages int64, err error)
	Release(ctx context.Context, off, n int64) (pages int64, err error)
	Sync(ctx context.Context, off, n int64, durable bool) error
	Advise(ctx context.Context, off, n int64, a pagecache.Advice) error
	Unmap(ctx context.Context) error
}

// ViewMapping is a client's window on a view, in which offsets count.
type ViewMapping interface {
	Mapping
	// Size returns the bytes of the view.
	Size() int64
}

// ForCache returns the Cache that serves clients from c. It keeps c.
func ForCache(c *pagecache.Cache) Cache { return pageCache{c} }

type pageCache struct{ cache *pagecache.Cache }

func (p pageCache) Map(ctx context.Context, src pagecache.Source, req pagecache.MapRequest) (Mapping, error) {
	m, err := p.cache.Map(ctx, src, req)
	if err != nil {
		return nil, err
	}
	return pageMapping{m}, nil
}

func (p pageCache) MapView(ctx context.Context, sources []pagecache.Source, req pagecache.ViewRequest) (ViewMapping, error) {
	m, err := p.cache.MapView(ctx, sources, req)
	if err != nil {
		return nil, err
	}
	return viewMapping{m}, nil
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

type viewMapping struct{ *pagecache.ViewMapping }

func (v viewMapping) Device() Device {
	info := v.ViewMapping.Device()
	return Device{Ordinal: info.Ordinal, Kind: uint8(info.Kind), UUID: info.UUID}
}
