package mover

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// tenantKey is the key of the tenant in a context.
type tenantKey struct{}

// WithTenant returns a context for transfers on a user's behalf.
func WithTenant(ctx context.Context, user uint32) context.Context {
	return context.WithValue(ctx, tenantKey{}, user)
}

// tenantOf returns the user on whose behalf a transfer is made, or 0 if none is set.
func tenantOf(ctx context.Context) uint32 {
	user, _ := ctx.Value(tenantKey{}).(uint32)
	return user
}

// aheadKey is the key of the function in an Ahead context.
type aheadKey struct{}

// Ahead returns a context for read-ahead. Its transfers are of class Prefetch instead of Acquire. While awaited reports
// true, somebody waits for them after all, and what then queues is of class Acquire. awaited must not block.
func Ahead(ctx context.Context, awaited func() bool) context.Context {
	return context.WithValue(ctx, aheadKey{}, awaited)
}

// classIn returns the class of a request that queues now, for a transfer of class c.
func classIn(ctx context.Context, c Class) Class {
	if awaited, ok := ctx.Value(aheadKey{}).(func() bool); ok && c == Acquire && !awaited() {
		return Prefetch
	}
	return c
}

// cut cuts the list of a transfer into calls of at most most bytes; 0 means no limit. An element that does not fit into
// the rest of a call is split into its first bytes and one or more elements with the others. If split is nil, it goes
// into the next call, which must have room for it.
func cut[T any](list []T, most int64, size func(*T) int64, split func(x T, at int64) (T, []T)) (calls [][]T) {
	if most == 0 || sizes([][]T{list}, size)[0] <= most {
		return [][]T{list}
	}
	var call []T
	room := most
	for i := range list {
		for left := list[i : i+1]; len(left) > 0; {
			x := left[0]
			if n := size(&x); n <= room {
				call, room, left = append(call, x), room-n, left[1:]
				continue
			}
			if split != nil && room > 0 {
				first, rest := split(x, room)
				call, left = append(call, first), append(rest, left[1:]...)
			}
			calls, call, room = append(calls, call), nil, most
		}
	}
	return append(calls, call)
}

// sizes returns the bytes of each call.
func sizes[T any](calls [][]T, size func(*T) int64) []int64 {
	all := make([]int64, len(calls))
	for k, list := range calls {
		for i := range list {
			all[k] += size(&list[i])
		}
	}
	return all
}

func copySize(c *gpubackend.Copy) int64 { return c.Bytes() }

// copySizes returns the bytes of all copies.
func copySizes(list []gpubackend.Copy) (n int64) {
	for i := range list {
		n += list[i].Bytes()
	}
	return n
}

func splitCopy(c gpubackend.Copy, at int64) (first gpubackend.Copy, rest []gpubackend.Copy) {
	parts := c.AppendPart(c.AppendPart(nil, 0, at), at, c.Bytes()-at)
	return parts[0], parts[1:]
}

func peerSize(c *gpubackend.PeerCopy) int64 { return c.N }

func splitPeer(c gpubackend.PeerCopy, at int64) (first gpubackend.PeerCopy, rest []gpubackend.PeerCopy) {
	a, b := c, c
	a.N, b.N, b.Off, b.FromOff = at, c.N-at, c.Off+at, c.FromOff+at
	return a, []gpubackend.PeerCopy{b}
}

func patchSize(*gpubackend.Patch) int64 { return page.Size }
