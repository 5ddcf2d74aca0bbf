package controltest

import (
	"context"
	"fmt"
	"sync"
	"syscall"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// View is a client's window on a view. It implements control.ViewMapping. Views share no memory.
type View struct {
	cache   *Cache
	device  int
	layout  *view.Layout
	homes   []pagecache.Home
	launder bool

	mu      sync.Mutex
	extents []*extent // guarded by mu
}

// OpenView makes a mapping of a view, without its bytes.
func (c *Cache) OpenView(_ context.Context, sources []pagecache.Source,
	req pagecache.ViewRequest) (control.ViewMapping, error) {
	layout, err := view.New(len(sources), req.Segments, req.Alignment)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	case req.Device < 0 || req.Device >= c.Devices:
		return nil, fmt.Errorf("there is no device %d: %w", req.Device, syscall.ENODEV)
	case layout.Size() > maxMapping:
		return nil, fmt.Errorf("%d bytes are more than a mapping may have: %w", layout.Size(), syscall.ENOMEM)
	}
	v := &View{cache: c, device: req.Device, layout: layout, launder: req.Launder}
	c.mu.Lock()
	c.countLocked(1)
	c.mu.Unlock()
	for _, src := range sources {
		h, err := src.OpenHome(false)
		if err != nil {
			v.Unmap(context.Background())
			return nil, err
		}
		v.homes = append(v.homes, h)
	}
	for off := int64(0); off < layout.Size(); off += ExtentSize {
		e, err := newExtent(ExtentSize)
		if err != nil {
			v.Unmap(context.Background())
			return nil, err
		}
		v.extents = append(v.extents, e)
	}
	return v, nil
}

// Fill copies the whole view, once the Gate lets it.
func (v *View) Fill(ctx context.Context) error {
	if gate := v.cache.Gate; gate != nil {
		if err := gate(ctx); err != nil {
			return err
		}
	}
	_, err := v.Acquire(ctx, 0, v.layout.Size(), v.launder)
	return err
}

// Size returns the bytes of the view.
func (v *View) Size() int64 { return v.layout.Size() }

// Device describes where the memory is.
func (v *View) Device() control.Device {
	return control.Device{Ordinal: v.device, Kind: v.cache.kind()}
}

// Extents returns the extents that cover the view.
func (v *View) Extents() (list []pagecache.Extent) {
	for i, e := range v.extents {
		list = append(list, pagecache.Extent{Offset: int64(i) * ExtentSize, Size: ExtentSize, Descriptor: e.readOnly})
	}
	return list
}

// Acquire copies the whole view again.
func (v *View) Acquire(context.Context, int64, int64, bool) (pages int64, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, home := range v.homes {
		for r := range v.layout.File(i).Runs(v.layout.File(i).Span()) {
			b := make([]byte, r.Len)
			if _, err := home.ReadAt(b, r.Off); err != nil {
				return 0, err
			}
			for at := r.View; len(b) > 0; {
				n := copy(v.extents[at/ExtentSize].mem[at%ExtentSize:], b)
				b, at = b[n:], at+int64(n)
			}
			pages++
		}
	}
	return pages, nil
}

// TakePastEnd returns 0.
func (v *View) TakePastEnd() int64 { return 0 }

// Release does nothing.
func (v *View) Release(context.Context, int64, int64) (int64, error) { return 0, nil }

// Sync does nothing.
func (v *View) Sync(context.Context, int64, int64, bool) error { return nil }

// Advise does nothing.
func (v *View) Advise(context.Context, int64, int64, pagecache.Advice) error { return nil }

// Abandon does nothing.
func (v *View) Abandon() {}

// Unmap ends the mapping.
func (v *View) Unmap(context.Context) error {
	for _, h := range v.homes {
		h.Close()
	}
	for _, e := range v.extents {
		e.free()
	}
	v.cache.mu.Lock()
	defer v.cache.mu.Unlock()
	v.cache.countLocked(-1)
	return nil
}

// Movable is false, because nothing moves here.
func (v *View) Movable() bool { return false }
