package controltest

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/pagecache"
)

// MovingExtent is the size of an extent of NewMovingCache.
const MovingExtent = 64 << 10

// NewMovingCache returns a page cache for tests of memory that moves. It has one emulated device of so many extents,
// and pinned memory for some more.
func NewMovingCache(t testing.TB, extents, pinned int64) *pagecache.Cache {
	t.Helper()
	device, err := emulated.New(emulated.Options{
		Memory: extents * MovingExtent, Granularity: MovingExtent, Poison: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	cache, err := pagecache.New(pagecache.Options{
		Devices: []gpubackend.Device{device}, PinnedMemory: pinned * MovingExtent,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return cache
}

// StartMoving serves such a page cache on the sockets "s" and "grants" in a folder. set, if given, changes the options.
func StartMoving(t testing.TB, dir string, extents, pinned int64,
	set ...func(*control.Options)) (*control.Server, *pagecache.Cache) {
	t.Helper()
	cache := NewMovingCache(t, extents, pinned)
	o := control.Options{Socket: filepath.Join(dir, "s"), Cache: control.ForCache(cache)}
	for _, f := range set {
		f(&o)
	}
	server, err := control.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	grants, err := ListenGrants(server, filepath.Join(dir, "grants"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		grants.Close()
	})
	return server, cache
}
