package pagecache

import (
	"bytes"
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Users of the tests. None of them is trusted.
const alice, bob, carol = 1001, 1002, 1003

// as maps a file of exposedPages pages for a user.
func (m *machine) as(user uint32, src *source, writable bool) *program {
	m.t.Helper()
	const size = exposedPages * page.Size
	return m.attach(m.mapping(src, MapRequest{Len: size, Writable: writable, User: user}), 0, size, writable)
}

// shared makes a file of alice's that everybody may change.
func shared(t *testing.T) (*machine, *source) {
	m, src := exposed(t)
	src.home.rights = Rights{UID: alice, GID: alice, Mode: 0o666}
	return m, src
}

func (m *machine) used() int64 { return m.cache.Status().Devices[0].UsedBytes }

const extentBytes = exposedPages * page.Size

// TestUsersShareMemory: any user with the rights shares the memory while it is mapped. A user always shares with
// itself.
func TestUsersShareMemory(t *testing.T) {
	m, src := shared(t)
	a := m.as(alice, src, true)
	b := m.as(bob, src, true)
	c := m.as(0, src, false)
	require.EqualValues(t, extentBytes, m.used())
	a.store(7, 'x')
	require.Equal(t, byte('x'), b.byteAt(7))
	require.Equal(t, byte('x'), c.byteAt(7))
	src.chmod(func(r *Rights) { r.Mode |= 0o111 })
	m.as(carol, src, false)
	require.EqualValues(t, extentBytes, m.used(), "nobody lost a right")
}

// TestMappingAgain: the next process of a user finds the memory as it was. So does another user, once the first one
// gave the memory back.
func TestMappingAgain(t *testing.T) {
	m, src := shared(t)
	m.keep(src)
	filled := func() int64 { return m.cache.counters.FilledPages.Load() }
	m.as(alice, src, true).unmapAndKeep()
	before := filled()
	again := m.as(alice, src, true)
	require.Equal(t, before, filled())
	again.unmap()
}

// TestMemoryThatWasGivenBackIsShared needs a device that can tell.
func TestMemoryThatWasGivenBackIsShared(t *testing.T) {
	m, src := shared(t)
	m.keep(src)
	m.as(alice, src, true).unmap()
	before := m.cache.counters.FilledPages.Load()
	m.as(bob, src, true)
	require.Equal(t, before, m.cache.counters.FilledPages.Load())
}

// TestKeptMemoryAfterUnmap: a user who keeps memory after unmapping sees nothing new there, and nobody sees the user's
// stores. The memory counts as used until it is given back.
func TestKeptMemoryAfterUnmap(t *testing.T) {
	m, src := shared(t)
	m.keep(src)
	used := m.used()
	a := m.as(alice, src, true)
	a.unmapAndKeep()
	b := m.as(bob, src, true)
	require.Equal(t, used+2*extentBytes, m.used())
	src.write(t, 0, []byte("new"))
	b.acquire()
	require.NotEqual(t, byte('n'), a.byteAt(0))
	require.Equal(t, "newret! ", string(b.load(0, 8)))
	a.store(page.Size, 'x')
	require.Equal(t, byte('s'), b.byteAt(page.Size))
	require.Zero(t, b.release())
	require.Equal(t, byte('s'), src.read(t, page.Size, 1)[0])
	a.giveUp()
	require.Equal(t, used+extentBytes, m.used())
}

// TestKeptMemoryIsOfTheBudget: clients cannot exceed the device's budget by unmapping.
func TestKeptMemoryIsOfTheBudget(t *testing.T) {
	testdevice.Emulated(t, "nobody can tell who kept a GPU's memory")
	m := newMachine(t, 1, memory(4*extentBytes))
	var kept []*program
	for range 4 {
		src := m.noisyFile(extentBytes)
		p := m.as(alice, src, false)
		p.unmapAndKeep()
		kept = append(kept, p)
	}
	src := m.noisyFile(extentBytes)
	_, err := m.cache.Map(t.Context(), src, MapRequest{Len: extentBytes, User: bob})
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "kept by programs that unmapped them")
	kept[2].giveUp()
	p := m.as(bob, src, false)
	require.True(t, bytes.Equal(src.home.data, p.all()))
}

// TestRightsTakenAway: a user who had memory before somebody lost rights finds no later bytes in it, even while it is
// mapped.
func TestRightsTakenAway(t *testing.T) {
	for name, take := range map[string]func(r *Rights){
		"mode":  func(r *Rights) { r.Mode = 0o600 },
		"owner": func(r *Rights) { r.UID = carol },
		"group": func(r *Rights) { r.GID = carol },
		"acl":   func(r *Rights) { r.ACL = "bob: nothing" },
	} {
		for _, unmapped := range []bool{true, false} {
			m, src := shared(t)
			m.keep(src)
			b := m.as(bob, src, true)
			b.store(3*page.Size, 'b')
			if unmapped {
				b.unmapAndKeep()
			} else {
				b.release()
			}
			src.chmod(take)
			require.Equal(t, byte('b'), src.home.bytes(3*page.Size, 1)[0], "%s: released bytes are home", name)
			b.store(4*page.Size, 'b')
			a := m.as(alice, src, true)
			a.store(0, 'A')
			src.write(t, page.Size, []byte("NEW"))
			a.acquire()
			require.NotEqual(t, byte('A'), b.byteAt(0), name)
			require.NotEqual(t, "NEW", string(b.load(page.Size, page.Size+3)), name)
			require.Equal(t, byte('s'), a.byteAt(4*page.Size), name)
			require.EqualValues(t, 1, a.release())
			require.Equal(t, byte('s'), src.read(t, 4*page.Size, 1)[0], name)
			require.Equal(t, "Aecret! ", string(src.read(t, 0, 8)), name)
			// Programs of one user, and root, go on with the memory that was given after that.
			used := m.used()
			m.as(alice, src, true)
			m.as(0, src, false)
			require.Equal(t, used, m.used())
		}
	}
}

// TestTwoMemoriesOfOneDevice: two memories on one device are coherent, like two devices.
func TestTwoMemoriesOfOneDevice(t *testing.T) {
	m, src := shared(t)
	b := m.as(bob, src, true)
	src.chmod(func(r *Rights) { r.Mode = 0o664 })
	a := m.as(alice, src, true)
	a.store(1, 'A')
	b.store(2, 'B')
	src.write(t, 3, []byte("C"))
	require.EqualValues(t, 1, a.release())
	require.EqualValues(t, 1, b.release())
	require.Equal(t, "sABCet! ", string(src.read(t, 0, 8)))
	a.acquire()
	b.acquire()
	require.Equal(t, "sABCet! ", string(a.load(0, 8)))
	require.Equal(t, "sABCet! ", string(b.load(0, 8)))
	require.Len(t, m.cache.Status().Files[0].Holders, 2)
	a.unmap()
	b.unmap()
	m.cache.evictAll(t)
	require.Zero(t, m.used())
	m.devices[0].Lose()
}

// TestReadersWhoCanStore: if a device cannot keep readers from storing, readers who may not change the file have
// separate memory, one for each user.
func TestReadersWhoCanStore(t *testing.T) {
	for _, trust := range []bool{false, true} {
		m := newMachine(t, 0, func(o *Options, _ *int64) { o.TrustUsers = trust })
		d, err := emulated.New(emulated.Options{Memory: 16 * extentBytes, WritableExports: true})
		require.NoError(t, err)
		c, err := New(Options{Devices: []gpubackend.Device{d}, TrustUsers: trust})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
		m.cache = c
		src := m.file(extentBytes)
		src.home.rights = Rights{UID: alice, GID: alice, Mode: 0o644}
		reader := &source{id: src.id, home: src.home, kernel: src.kernel, readonly: true}
		a := m.as(alice, src, true)
		b := m.as(bob, reader, false)
		again := m.as(bob, reader, false)
		root := m.as(0, reader, false)
		hers := m.as(alice, reader, false)
		if trust {
			require.EqualValues(t, extentBytes, m.used())
			continue
		}
		m.as(carol, reader, false)
		require.EqualValues(t, 3*extentBytes, m.used())
		// Bob maps for writing the memory that he was given for reading.
		intruder := m.attach(b.Mapping, 0, extentBytes, true)
		intruder.store(5, 'x')
		require.Equal(t, byte('x'), again.byteAt(5), "bob shares with himself")
		for _, p := range []*program{a, root, hers} {
			require.Zero(t, p.byteAt(5))
		}
		a.store(9, 'A')
		require.EqualValues(t, 1, a.release())
		require.Equal(t, "\x00\x00\x00\x00A", string(src.read(t, 5, 5)))
		again.acquire()
		require.Equal(t, byte('A'), again.byteAt(9))
		require.Zero(t, again.byteAt(5), "bob's store is gone")
	}
}

// TestWhoWasGivenNothingKeepsNoMemoryShared: alice keeps memory that she unmapped, while carol's mapping includes it
// but carol was not given it yet. Bob must not share it.
func TestWhoWasGivenNothingKeepsNoMemoryShared(t *testing.T) {
	m, src := shared(t)
	m.keep(src)
	a := m.as(alice, src, true)
	pin, err := a.dev.room.Reserve(t.Context(), a.h, residency.Request{
		Pages: a.pages, Size: extentBytes, By: residency.Tenant{User: carol},
	})
	require.NoError(t, err)
	defer pin.Free()
	a.unmapAndKeep()
	b := m.as(bob, src, true)
	b.store(0, 'B')
	require.NotEqual(t, byte('B'), a.byteAt(0))
}
