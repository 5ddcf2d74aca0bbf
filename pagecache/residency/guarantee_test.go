package residency

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// guaranteeing makes user 2 a tenant with so many granules guaranteed.
func guaranteeing(t *testing.T, d *Device, granules int64) {
	t.Helper()
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(2), Weight: 1, Guaranteed: granules * granule}})
}

// TestGuaranteeIsKept: others get no memory that is guaranteed to a tenant, even root, even while the tenant uses none
// of it. The refusal says so.
func TestGuaranteeIsKept(t *testing.T) {
	for _, user := range []uint32{0, 1} {
		t.Run(fmt.Sprint("user ", user), func(t *testing.T) {
			d, _ := newDevice(t, 8, 1)
			guaranteeing(t, d, 2)
			a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
			c.idle(t, 0, 1)
			_, err := a.take(user, 0, 7)
			require.ErrorIs(t, err, syscall.ENOMEM)
			require.ErrorContains(t, err, "what is guaranteed to other tenants leaves 384 KiB of its 512 KiB")
			require.Len(t, c.tiers(), 1, "nothing was evicted for a request that can never fit")
			six := take(t, a, user, 0, 6)
			require.Empty(t, c.tiers())
			_, err = a.take(user, 6, 7)
			require.ErrorIs(t, err, syscall.ENOMEM)
			_, err = c.take(3, 0, 1)
			require.ErrorIs(t, err, syscall.ENOMEM)
			require.ErrorContains(t, err, "needs 64 KiB of device 0, and only 0 B of its 512 KiB can be had")
			require.ErrorContains(t, err, "128 KiB are guaranteed to other tenants")
			two := take(t, b, 2, 0, 2)
			_, err = b.take(2, 2, 3)
			require.ErrorIs(t, err, syscall.ENOMEM, "more is not guaranteed")
			for _, p := range append(six, two...) {
				p.Free()
			}
		})
	}
}

// take maps granules one by one.
func take(t *testing.T, k *key, user uint32, from, to int) (pins []*Pin) {
	t.Helper()
	for i := from; i < to; i++ {
		p, err := k.take(user, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		pins = append(pins, p)
	}
	return pins
}

// TestGuaranteeOfIdleExtents: what a tenant leaves idle within its guarantee stays its. Others that map it make room
// for the guarantee first, and fail if they cannot.
func TestGuaranteeOfIdleExtents(t *testing.T) {
	d, _ := newDevice(t, 6, 1)
	guaranteeing(t, d, 2)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	for _, p := range take(t, b, 2, 0, 2) {
		p.Free()
	}
	four := take(t, a, 1, 0, 4)
	_, err := b.take(1, 0, 1)
	require.ErrorIs(t, err, syscall.ENOMEM, "user 2 could not map as much as is guaranteed")
	require.ErrorContains(t, err, "are guaranteed to other tenants")
	four[0].Free()
	p, err := b.take(1, 0, 1)
	require.NoError(t, err, "an idle extent of its own made room")
	require.Len(t, a.tiers(), 3)
	theirs := take(t, c, 2, 0, 2)
	for _, p := range append(append(four[1:], theirs...), p) {
		p.Free()
	}
}

// TestGuaranteeBesideBrackets: a bracket takes pinned memory instead of what is guaranteed to others, and its extents
// do not move back there. One that could only fit into guaranteed memory fails at once.
func TestGuaranteeBesideBrackets(t *testing.T) {
	d, _ := newPinnedDevice(t, 4, 2)
	guaranteeing(t, d, 2)
	a, b := newKey(t, d), newKey(t, d)
	ask := func(user uint32, k *key, to page.Index) (*Grant, error) {
		return d.Grant(context.Background(), []Want{k.want(0, to)}, Asking{By: Tenant{User: user}, Patience: patient})
	}
	for range 2 {
		g, err := ask(1, a, 3)
		require.NoError(t, err)
		require.Equal(t, []Tier{TierVRAM, TierVRAM, TierHost}, a.tiers())
		g.Free()
	}
	_, err := ask(1, a, 5)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "user 1 may own no more than 128 KiB of it and 128 KiB of pinned memory")
	g, err := ask(1, a, 4)
	require.NoError(t, err)
	theirs, err := ask(2, b, 2)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, b.tiers())
	g.Free()
	theirs.Free()
}

// TestGuaranteeBesideKeptMemory: memory that programs keep after they unmapped it leaves no less for a guarantee.
func TestGuaranteeBesideKeptMemory(t *testing.T) {
	d, _ := newDevice(t, 6, 1)
	guaranteeing(t, d, 2)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	copied := take(t, a, 1, 0, 3)
	for _, p := range copied {
		x := p.Extents()[0]
		x.Hold()
		defer x.LetGo()
		p.Free()
	}
	a.letGo(t) // the memory stays until the copies have ended
	one := take(t, b, 1, 0, 1)
	ctx, end := context.WithCancel(t.Context())
	end()
	_, err := b.takeWith(ctx, 1, 1, 2)
	require.Error(t, err)
	two := take(t, c, 2, 0, 2)
	for _, p := range append(one, two...) {
		p.Free()
	}
}

// TestABracketThatNeverFits: extents that a tenant owns already count toward what its bracket needs, and extents are
// not divided between memories. So a bracket that can never fit fails at once.
func TestABracketThatNeverFits(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 1)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}})
	k := newKey(t, d)
	ask := func(to page.Index) (*Grant, error) {
		return d.Grant(context.Background(), []Want{k.want(0, to)}, Asking{By: Tenant{User: 1}, Patience: patient})
	}
	g, err := ask(2)
	require.NoError(t, err)
	g.Free()
	_, err = ask(4)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "the bracket needs 256 KiB on device 0, but user 1 may own no more than 128 KiB")
	g, err = ask(3)
	require.NoError(t, err)
	g.Free()

	large := newKey(t, d)
	_, err = d.Grant(context.Background(), []Want{{large, granules(0, 4), 2 * granule}},
		Asking{By: Tenant{User: 1}, Patience: patient})
	require.ErrorIs(t, err, syscall.ENOMEM, "the second extent fits neither on the device nor into pinned memory")
	require.True(t, packs([]int64{1, 2, 1, 4}, 4, 4))
	require.False(t, packs([]int64{2, 2}, 3, 1))
	require.True(t, packs([]int64{2, 1, 1}, 3, 1))
}

// TestRefusalsSayWho: a refusal names what was asked, what is free, and the programs that have the rest, as far as the
// user may see them.
func TestRefusalsSayWho(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 1)
	d.options.Name = func(process uint32) string { return fmt.Sprint("p", process) }
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	reserve := func(k *key, by Tenant, from, to page.Index) (*Pin, error) {
		return d.Reserve(t.Context(), k, Request{Pages: granules(from, to), Size: granule, By: by})
	}
	p, err := reserve(a, Tenant{User: 1, Process: 11}, 0, 5)
	require.NoError(t, err)
	again, err := reserve(a, Tenant{User: 1, Process: 11}, 0, 1)
	require.NoError(t, err)
	_, err = reserve(b, Tenant{User: 0}, 0, 5)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "the mapping needs 320 KiB of device 0, and only 192 KiB of its 512 KiB can be had: "+
		"process 11 (p11) of user 1 maps 320 KiB; unmap something")
	_, err = reserve(b, Tenant{User: 2, Limited: true}, 0, 5)
	require.ErrorContains(t, err, "320 KiB are mapped by programs of other users")
	require.NotContains(t, err.Error(), "11")

	d.SetShare(0.75)
	own, err := reserve(b, Tenant{User: 1, Process: 12, Limited: true}, 0, 1)
	require.NoError(t, err)
	_, err = reserve(b, Tenant{User: 1, Limited: true}, 1, 3)
	require.ErrorContains(t, err, "needs 128 KiB of device 0, and user 1 may map no more than 384 KiB of its 512 KiB and "+
		"maps 384 KiB already (process 11 (p11) maps 320 KiB, process 12 (p12) maps 64 KiB)")
	_, err = reserve(c, Tenant{User: 3, Limited: true}, 0, 7)
	require.ErrorContains(t, err, "user 3 may map no more than 384 KiB of its 512 KiB and maps 0 B already;")

	g, err := d.Grant(t.Context(), []Want{c.want(0, 2)}, Asking{By: Tenant{User: 2, Process: 13}, Patience: patient})
	require.NoError(t, err)
	_, err = d.Grant(t.Context(), []Want{c.want(2, 4)},
		Asking{By: Tenant{User: 2, Process: 13, Limited: true}, Nested: true})
	require.ErrorContains(t, err, "process 13 (p13) holds 128 KiB in a bracket for ")
	require.ErrorContains(t, err, "384 KiB are mapped by programs of other users.")
	_, err = d.Grant(t.Context(), []Want{c.want(2, 4)}, Asking{By: Tenant{User: 4, Limited: true}, Nested: true})
	require.ErrorContains(t, err, "128 KiB are in brackets of other users")
	_, err = reserve(b, Tenant{User: 0}, 1, 2)
	require.ErrorContains(t, err, "process 13 (p13) holds 128 KiB in a bracket for ")
	g.Free()
	for _, p := range []*Pin{p, again, own} {
		p.Free()
	}
}

// TestNoDescriptors: if the daemon has no descriptors for more memory, requests fail at once and say so, in the log
// too. What can leave makes room first.
func TestNoDescriptors(t *testing.T) {
	d, f := newPinnedDevice(t, 4, 1)
	var log bytes.Buffer
	d.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	none := fmt.Errorf("%w: create a memfd: %w", gpubackend.ErrNoMemory, syscall.EMFILE)
	a, b := newKey(t, d), newKey(t, d)
	f.Fail(faulty.Alloc, 1, none)
	_, err := a.take(0, 0, 1)
	require.ErrorIs(t, err, syscall.ENFILE)
	require.ErrorContains(t, err, "the daemon has no descriptors left for memory of device 0")
	require.Contains(t, log.String(), "level=WARN")
	f.Fail(faulty.Alloc, 1, none)
	f.Fail(faulty.Alloc, 2, none)
	f.Fail(faulty.AllocHost, 1, none)
	_, err = b.grant(false, 0, 1)
	require.ErrorIs(t, err, syscall.ENFILE)
	a.idle(t, 0, 1)
	f.Fail(faulty.Alloc, 1, none)
	p, err := b.take(0, 0, 1)
	require.NoError(t, err)
	require.Empty(t, a.tiers())
	p.Free()
}
