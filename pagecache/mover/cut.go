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

// cut cuts the list of a transfer into calls of at most most bytes; 0 means no limit. An element that does not fit into
// the rest of a call is split. If split is nil, it goes into the next call, which must have room for it.
func cut[T any](list []T, most int64, size func(*T) int64, split func(x T, at int64) (T, T)) (calls [][]T) {
	if most == 0 || sizes([][]T{list}, size)[0] <= most {
		return [][]T{list}
	}
	var call []T
	room := most
	for _, x := range list {
		for size(&x) > room {
			if split != nil && room > 0 {
				var first T
				first, x = split(x, room)
				call = append(call, first)
			}
			calls, call, room = append(calls, call), nil, most
		}
		call, room = append(call, x), room-size(&x)
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

func copySize(c *gpubackend.Copy) int64 { return int64(len(c.Host)) }

func splitCopy(c gpubackend.Copy, at int64) (a, b gpubackend.Copy) {
	a, b = c, c
	a.Host, b.Host, b.Off = c.Host[:at:at], c.Host[at:], c.Off+at
	return a, b
}

func peerSize(c *gpubackend.PeerCopy) int64 { return c.N }

func splitPeer(c gpubackend.PeerCopy, at int64) (a, b gpubackend.PeerCopy) {
	a, b = c, c
	a.N, b.N, b.Off, b.FromOff = at, c.N-at, c.Off+at, c.FromOff+at
	return a, b
}

func patchSize(*gpubackend.Patch) int64 { return page.Size }
