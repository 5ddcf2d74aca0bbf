package residency

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// owned returns what a user owns by the ledger.
func (d *Device) owned(user uint32) int64 {
	for _, a := range d.Status().Tenants {
		if a.Tenant == tenants.User(user) {
			return a.Owned
		}
	}
	return 0
}

// TestOwnerIsWhoMapsFirst: a mapped extent is charged to the first of those who map it, an idle one to the last who
// did.
func TestOwnerIsWhoMapsFirst(t *testing.T) {
	d, _ := newDevice(t, 2, 1)
	k := newKey(t, d)
	first, err := k.take(1, 0, 1)
	require.NoError(t, err)
	second, err := k.take(2, 0, 1)
	require.NoError(t, err)
	require.EqualValues(t, granule, d.owned(1))
	require.Zero(t, d.owned(2))
	first.Free()
	require.Zero(t, d.owned(1))
	require.EqualValues(t, granule, d.owned(2))
	second.Free()
	require.EqualValues(t, granule, d.owned(2))
	third, err := k.take(3, 0, 1)
	require.NoError(t, err)
	require.Zero(t, d.owned(2))
	require.EqualValues(t, granule, d.owned(3))
	third.Free()
}

// TestMostOfATenant: a tenant at its maximum evicts its own extents, although memory is free. If programs map all of
// them, the refusal names the maximum. A grant takes pinned memory, which does not count.
func TestMostOfATenant(t *testing.T) {
	d, _ := newPinnedDevice(t, 6, 2)
	require.NoError(t, d.CheckTenants([]tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}}))
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}})
	other, a, b := newKey(t, d), newKey(t, d), newKey(t, d)
	other.idle(t, 0, 1)
	for i := range 3 {
		p, err := a.take(1, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		p.Free()
	}
	require.EqualValues(t, 2*granule, d.owned(1))
	require.Len(t, a.tiers(), 2, "its own extents left")
	require.Len(t, other.tiers(), 1)
	p, err := b.take(1, 0, 2)
	require.NoError(t, err)
	_, err = a.take(1, 5, 6)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "no more than 128 KiB (the maximum of tenant user 1)")
	g, err := d.Grant(context.Background(), []Want{a.want(0, 1)}, Asking{By: Tenant{User: 1}, Patience: patient})
	require.NoError(t, err)
	require.Equal(t, []Tier{TierHost}, a.tiers())
	require.EqualValues(t, 2*granule, d.owned(1))
	g.Free()
	p.Free()
}

// TestMostOfATenantOfWhatOthersHad: an extent that another tenant had mapped counts toward the maximum of the tenant
// that maps it next, whose own extents make room.
func TestMostOfATenantOfWhatOthersHad(t *testing.T) {
	d, _ := newDevice(t, 8, 1)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}})
	theirs, mine := newKey(t, d), newKey(t, d)
	for i := range 4 {
		p, err := theirs.take(2, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		p.Free()
	}
	p, err := mine.take(1, 0, 1)
	require.NoError(t, err)
	p.Free()
	p, err = theirs.take(1, 0, 2)
	require.NoError(t, err)
	require.Empty(t, mine.tiers(), "its own extent left")
	require.EqualValues(t, 2*granule, d.owned(1))
	_, err = theirs.take(1, 2, 3)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "(the maximum of tenant user 1)")
	used, err := theirs.take(2, 2, 3)
	require.NoError(t, err)
	both, err := theirs.take(1, 2, 3)
	require.NoError(t, err, "it is on another tenant's account")
	require.EqualValues(t, 2*granule, d.owned(1))
	both.Free()
	used.Free()
	p.Free()
}

// TestMostOfATenantInBrackets: extents that a bracket uses again stay in pinned memory if its tenant may own no more of
// the device, although there is room.
func TestMostOfATenantInBrackets(t *testing.T) {
	d, _ := newPinnedDevice(t, 6, 2)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}})
	a, b := newKey(t, d), newKey(t, d)
	used, err := d.Grant(context.Background(), []Want{a.want(0, 2)}, Asking{By: Tenant{User: 1}, Patience: patient})
	require.NoError(t, err)
	for range 2 {
		g, err := d.Grant(context.Background(), []Want{b.want(0, 1)}, Asking{By: Tenant{User: 1}, Patience: patient})
		require.NoError(t, err)
		require.Equal(t, []Tier{TierHost}, b.tiers())
		require.EqualValues(t, 2*granule, d.owned(1))
		g.Free()
	}
	used.Free()
	g, err := d.Grant(context.Background(), []Want{b.want(0, 1)}, Asking{By: Tenant{User: 2}, Patience: patient})
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM}, b.tiers(), "another tenant may own it")
	g.Free()
}

// TestMostOfATenantOfWhatOthersHadInBrackets: a bracket takes over other tenants' extents on the device only up to its
// tenant's maximum. Idle extents of its own make room, and the rest moves to pinned memory.
func TestMostOfATenantOfWhatOthersHadInBrackets(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 4)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule}})
	theirs, mine, file := newKey(t, d), newKey(t, d), newKey(t, d)
	ask := func(k *key, from, to page.Index) (*Grant, error) {
		return d.Grant(context.Background(), []Want{k.want(from, to)}, Asking{By: Tenant{User: 1}, Nested: true})
	}
	for i := range 4 {
		theirs.idle(t, pageOf(i), pageOf(i+1))
	}
	file.pinned.Store(&Tenant{})
	file.idle(t, 0, 1)
	p, err := mine.take(1, 0, 1)
	require.NoError(t, err)
	p.Free()

	d.pinned.SetLimit(granule)
	_, err = ask(theirs, 0, 4)
	require.ErrorIs(t, err, syscall.ENOMEM, "it can never have as much")
	d.pinned.SetLimit(4 * granule)
	g, err := ask(theirs, 0, 4)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM, TierVRAM, TierHost, TierHost}, theirs.tiers())
	require.Empty(t, mine.tiers(), "its own extent left")
	require.EqualValues(t, 2*granule, d.owned(1))
	require.EqualValues(t, 2*granule, d.Status().MovedOut)
	require.Equal(t, []tenants.Account{{Tenant: tenants.User(1), Owned: 2 * granule, Share: 4 * granule}},
		d.pinned.Tenants())
	pinned, err := ask(file, 0, 1)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM}, file.tiers(), "it is pinned to the device")
	pinned.Free()
	file.letGo(t)

	other := newKey(t, d)
	other.idle(t, 0, 1)
	other.idle(t, 1, 2)
	used, err := other.take(2, 1, 2)
	require.NoError(t, err)
	keep := d.Keep(other, granules(0, 1))
	_, err = ask(other, 0, 1)
	require.ErrorIs(t, err, syscall.EDEADLK, "it cannot move now")
	both, err := ask(other, 1, 2)
	require.NoError(t, err, "it is on another tenant's account")
	keep.Free()
	x := other.Extents(granules(0, 1))[0]
	x.Hold()
	more, err := ask(other, 0, 1)
	require.NoError(t, err)
	x.LetGo()
	require.Equal(t, []Tier{TierHost, TierVRAM}, other.tiers(), "the copy keeps the old memory")
	require.EqualValues(t, 2*granule, d.owned(1))
	for _, g := range []*Grant{g, both, more} {
		g.Free()
	}
	used.Free()
}

// TestKeepLeavesTheOwner: a kept extent stays on its owner's account until another tenant maps it.
func TestKeepLeavesTheOwner(t *testing.T) {
	d, _ := newDevice(t, 2, 1)
	k := newKey(t, d)
	p, err := k.take(1, 0, 1)
	require.NoError(t, err)
	p.Free()
	keep := d.Keep(k, granules(0, 1))
	require.EqualValues(t, granule, d.owned(1))
	p, err = k.take(2, 0, 1)
	require.NoError(t, err)
	require.EqualValues(t, granule, d.owned(2))
	keep.Free()
	p.Free()
	require.EqualValues(t, granule, d.owned(2))
}

// TestMostPinned: a tenant at its maximum of pinned memory gets no more, although there is some. It waits for its own
// brackets, with that reason, and is refused at once if the request can never fit. A tenant that owns nothing of the
// device makes room in pinned memory, too.
func TestMostPinned(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 4)
	list := []tenants.Tenant{{ID: tenants.User(1), Weight: 1, MostPinned: granule}}
	require.NoError(t, d.CheckTenants(list))
	d.setTenants(t, list)
	all, a, b := newKey(t, d), newKey(t, d), newKey(t, d)
	mapped, err := all.take(2, 0, 2)
	require.NoError(t, err)
	ask := func(k *key, user uint32, patience time.Duration, from, to page.Index) (*Grant, error) {
		return d.Grant(context.Background(), []Want{k.want(from, to)},
			Asking{By: Tenant{User: user}, Patience: patience})
	}
	g, err := ask(a, 1, patient, 0, 1)
	require.NoError(t, err)
	_, err = ask(a, 1, time.Millisecond, 1, 2)
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.ErrorContains(t, err, "64 KiB of pinned memory (the maxima of tenant user 1)")
	_, err = ask(b, 1, time.Millisecond, 0, 4)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "user 1 may own no more than 128 KiB of it and 64 KiB of pinned memory")
	g.Free()
	g, err = ask(a, 1, patient, 1, 2)
	require.NoError(t, err, "its own idle extents make room")
	require.Equal(t, []tenants.Account{{Tenant: tenants.User(1), Owned: granule, Share: 4 * granule, Most: granule}},
		d.pinned.Tenants())
	g.Free()
	require.Equal(t, []Tier{TierHost}, a.tiers())
	g, err = ask(b, 3, patient, 0, 4)
	require.NoError(t, err, "another tenant takes it all")
	require.Empty(t, a.tiers())
	g.Free()
	mapped.Free()
}

// TestMostPinnedOfWhatLeaves: an extent does not move to pinned memory if its owner may have no more of it.
func TestMostPinnedOfWhatLeaves(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 4)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, MostPinned: granule}})
	k := newKey(t, d)
	p, err := k.take(1, 0, 1)
	require.NoError(t, err)
	p.Free()
	p, err = k.take(1, 1, 2)
	require.NoError(t, err)
	p.Free()
	nothing := func(_, _ gpubackend.Memory) error { return nil }
	x := k.Extents(granules(0, 2))
	require.True(t, x[0].Demote(context.Background(), nothing))
	require.False(t, x[1].Demote(context.Background(), nothing))
	d.setTenants(t, nil)
	require.True(t, x[1].Demote(context.Background(), nothing))
}

// TestRequesterIsCounted: a request counts as owned when a victim is chosen. So a tenant that owns as much as another
// one gives way itself.
func TestRequesterIsCounted(t *testing.T) {
	d, _ := newDevice(t, 4, 1)
	mine, theirs := newKey(t, d), newKey(t, d)
	for i := range 2 {
		for user, k := range map[uint32]*key{1: mine, 2: theirs} {
			p, err := k.take(user, pageOf(i), pageOf(i+1))
			require.NoError(t, err)
			p.Free()
		}
	}
	p, err := mine.take(1, 2, 3)
	require.NoError(t, err)
	p.Free()
	require.Len(t, theirs.tiers(), 2)
	require.Len(t, mine.tiers(), 2)
}

// TestGuaranteeHolds: nobody takes guaranteed memory from another tenant.
func TestGuaranteeHolds(t *testing.T) {
	d, _ := newDevice(t, 4, 1)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 0.01, Guaranteed: 2 * granule}})
	require.ErrorContains(t, d.CheckBudget(granule), "more is guaranteed to tenants than")
	safe, k := newKey(t, d), newKey(t, d)
	p, err := safe.take(1, 0, 1)
	require.NoError(t, err)
	p.Free()
	p, err = safe.take(1, 1, 2)
	require.NoError(t, err)
	p.Free()
	for i := range 5 {
		p, err := k.take(2, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		p.Free()
	}
	require.Len(t, safe.tiers(), 2)
	_, err = k.take(2, 10, 13)
	require.ErrorIs(t, err, syscall.ENOMEM)
}

// TestInnermostCgroup: a process belongs to the tenant that it names and may be; otherwise to the innermost configured
// cgroup; otherwise to its user.
func TestInnermostCgroup(t *testing.T) {
	d, _ := newDevice(t, 1, 1)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.Cgroup("/a"), Weight: 1}, {ID: tenants.Cgroup("/a/b"), Weight: 2}})
	d.setTenants(t, append([]tenants.Tenant{{ID: tenants.Named("x"), Weight: 1, Users: []uint32{7}}},
		d.options.Tenants...))
	for cgroup, want := range map[string]tenants.ID{
		"/a": "cgroup /a", "/a/c": "cgroup /a", "/a/b": "cgroup /a/b", "/a/b/c": "cgroup /a/b", "/ab": "user 7",
		"": "user 7", "/": "user 7",
	} {
		got, err := d.Account(tenants.Process{User: 7, Cgroup: func() (string, error) { return cgroup, nil }})
		require.NoError(t, err)
		require.Equal(t, want, got, cgroup)
	}
	got, err := d.Account(tenants.Process{User: 7, Cgroup: func() (string, error) { return "/a", nil }, Name: "x"})
	require.NoError(t, err)
	require.Equal(t, tenants.Named("x"), got)
	_, err = d.Account(tenants.Process{User: 7, Cgroup: func() (string, error) { return "", errors.New("gone") }})
	require.ErrorIs(t, err, syscall.EACCES)
	_, err = d.Account(tenants.Process{User: 8, Name: "x"})
	require.ErrorIs(t, err, syscall.EACCES)
	require.ErrorContains(t, err, "user 8 may not be the tenant named \"x\"")
	_, err = d.Account(tenants.Process{User: 7, Name: "/a"})
	require.ErrorIs(t, err, syscall.EACCES)
	require.ErrorContains(t, err, "knows no tenant named \"/a\"")
}

// TestInnermostDirectory: files below a configured directory are charged to it, whoever maps them: to the innermost
// directory that contains all files.
func TestInnermostDirectory(t *testing.T) {
	d, _ := newDevice(t, 1, 1)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.Directory("a"), Weight: 1}, {ID: tenants.Directory("a/b"), Weight: 1},
		{ID: tenants.Named("x"), Weight: 1, Everyone: true}, {ID: tenants.Cgroup("/c"), Weight: 1}})
	inC := func() (string, error) { return "/c", nil }
	for want, files := range map[tenants.ID][]string{
		"directory a/b": {"a/b/c/d", "a/b/e"}, "directory a": {"a/b/c", "a/d"}, "named x": {"a/b/c", "d"},
		"cgroup /c": {"ab/c"}, "user 7": nil,
	} {
		p := tenants.Process{User: 7, Files: files}
		switch want {
		case "named x":
			p.Name = "x"
		case "cgroup /c":
			p.Cgroup = inC
		case "directory a":
			p.Cgroup, p.Name = inC, "x"
		}
		got, err := d.Account(p)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := d.Account(tenants.Process{Files: []string{"a/b"}, Name: "y"})
	require.ErrorIs(t, err, syscall.EACCES, "an unknown name is always an error")
}

// pageOf returns a granule's first page, as takers want it.
func pageOf(i int) page.Index { return page.Index(i) }
