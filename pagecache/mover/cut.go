package mover

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// tenantKey is the key of a context's tenant.
type tenantKey struct{}

// WithTenant returns a context of transfers that are made on a user's behalf.
func WithTenant(ctx context.Context, user uint32) context.Context {
	return context.WithValue(ctx, tenantKey{}, user)
}

// tenantOf returns on whose behalf a transfer is made, 0 where nobody said.
func tenantOf(ctx context.Context) uint32 {
	user, _ := ctx.Value(tenantKey{}).(uint32)
	return user
}

// cut cuts a list of what a call moves into calls of at most most bytes, 0 being without end. What does not go into the
// rest of a call is split; where split is nil it goes into the next, which it fits into.
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
