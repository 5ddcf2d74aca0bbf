package controltest

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/control"
)

// Group is a group of ranges. Release releases them one after the other. It implements control.Group.
type Group struct {
	cache  *Cache
	ranges []control.Range
}

// BeginGroup notes the ranges.
func (c *Cache) BeginGroup(_ context.Context, ranges []control.Range) (control.Group, error) {
	for _, r := range ranges {
		if m, ok := r.Of.(*Mapping); !ok || !m.req.Writable {
			return nil, fmt.Errorf("a mapping is only read: %w", syscall.EACCES)
		}
	}
	return &Group{c, ranges}, nil
}

// Release releases all ranges, and makes a version.
func (g *Group) Release(ctx context.Context) (version uint64, pages int64, err error) {
	for _, r := range g.ranges {
		n, err := r.Of.Release(ctx, r.Off, r.Len)
		if pages += n; err != nil {
			return 0, pages, err
		}
	}
	return g.cache.version.Add(1), pages, nil
}

// Abort leaves the stores as they are.
func (g *Group) Abort(context.Context) {}

// AwaitVersion polls for the version of any group.
func (c *Cache) AwaitVersion(ctx context.Context, _ []control.Range, least uint64) error {
	for c.version.Load() < least {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// AcquireAll acquires one range after the other.
func (c *Cache) AcquireAll(ctx context.Context, ranges []control.Range,
	launder bool) (version uint64, pages int64, err error) {
	for _, r := range ranges {
		n, err := r.Of.Acquire(ctx, r.Off, r.Len, launder)
		if pages += n; err != nil {
			return 0, pages, err
		}
	}
	return c.version.Load(), pages, nil
}
