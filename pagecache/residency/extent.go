package residency

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Tier is a kind of memory that an extent can be in.
type Tier uint8

const (
	// TierNone is no memory: only home may have the bytes.
	TierNone Tier = iota
	// TierVRAM is the device's own memory.
	TierVRAM
	// TierHost is pinned memory of the host, at the same addresses for programs, and slower.
	TierHost
)

// Placement is where the bytes of an extent are.
type Placement struct {
	Tier Tier
	// Memory is nil in TierNone.
	Memory gpubackend.Memory
	// Generation counts the placements that the extent has had. The first one with memory is 1.
	Generation uint64
}

// state is that of an Extent; the package comment has their transitions. Those that a Key has are idle or mapped by
// whether there are pins.
type state uint8

const (
	made state = iota
	held
	left
	freed
)

// Extent is memory that caches pages of a file for a Key.
type Extent struct {
	dev   *Device
	key   Key
	pages page.Range // immutable
	size  int64      // immutable; in bytes
	// littered says that the memory had anything in it when the extent was made. Immutable.
	littered bool

	placement atomic.Pointer[Placement] // never nil; changed by place
	// users are the Key, every Pin, and those who copy. The last one frees the memory.
	users atomic.Int32

	id      policy.ID      // protected by Device.mu
	owner   tenants.ID     // the first of mappers, or the last there was; protected by Device.mu
	mappers []tenants.ID   // one for each pin that Keep did not make, in order; protected by Device.mu
	counted Tier           // of which the owner's account has it, TierNone: none; protected by Device.mu
	state   state          // protected by Device.mu
	pins    map[uint32]int // of each user; protected by Device.mu
	kept    int            // pins that Keep made; protected by Device.mu
	mapped  int            // pins of all users, and kept; protected by Device.mu
	watches []*Pin         // protected by Device.mu
	written bool           // a program changed some of it since it was placed; protected by Device.mu
	moving  bool           // other memory is being filled for it; protected by Device.mu
	had     []uint32       // users who may have been given the memory that it has; protected by Device.mu
}

// Pages returns the pages of the file that x caches.
func (x *Extent) Pages() page.Range { return x.pages }

// Size returns the bytes of x. At the end of what a file can have they are more than its pages'.
func (x *Extent) Size() int64 { return x.size }

// Littered reports whether x may have had anything in it when it was made, rather than zeros.
func (x *Extent) Littered() bool { return x.littered }

// Placement returns where the bytes are. It stays so while the caller uses x, as the package comment has it.
func (x *Extent) Placement() Placement { return *x.placement.Load() }

// Memory returns the Memory of the Placement.
func (x *Extent) Memory() gpubackend.Memory { return x.placement.Load().Memory }

// Hold counts one more user, who copies from or to the memory. x is in use already, by the Key or by the caller.
func (x *Extent) Hold() { x.users.Add(1) }

// TryHold is Hold for a caller who may not use x: it reports false where nobody does, and the memory is being freed. It
// needs no lock. So whoever looks that nobody copies, before he changes where x is, first tells those who may try.
func (x *Extent) TryHold() bool {
	for {
		n := x.users.Load()
		if n <= 0 {
			return false
		}
		if x.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// dying is in Extent.had for clients that ended without unmapping. No user has this number (chown(2)).
const dying = math.MaxUint32

// Abandon says that a client which was given the memory ended and did not unmap it. Its kernels may go on storing there
// for a while, whoever's the memory is by then.
func (x *Extent) Abandon() {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	if !slices.Contains(x.had, dying) {
		x.had = append(x.had, dying)
	}
}

// LetGo takes a user back. It blocks until the device has freed the memory, where that was the last one.
func (x *Extent) LetGo() {
	if x.users.Add(-1) > 0 {
		return
	}
	d, was := x.dev, x.Placement()
	x.place(TierNone, nil)
	d.mu.Lock()
	had := x.had
	d.mu.Unlock()
	d.free(was, had)
	d.mu.Lock()
	x.state = freed
	d.leaving--
	d.takenLocked(was.Tier, -x.size)
	d.checkLocked()
	d.mu.Unlock()
	d.wake()
}

// free gives memory back, to who makes room, to the device or to the pool of pinned memory. had are the users who may
// have been given it.
func (d *Device) free(at Placement, had []uint32) {
	if at.Tier == TierHost {
		d.pinned.put(d, at.Memory, had)
		return
	}
	d.mu.Lock()
	s := d.stock
	d.mu.Unlock()
	if s == nil || !s.keep(at.Memory, had) {
		d.freeOwn(at.Memory)
	}
}

// freeOwn gives memory of the device's own back to it.
func (d *Device) freeOwn(mem gpubackend.Memory) {
	if err := mem.Free(); err != nil {
		d.options.Log.Warn("freeing device memory", "device", d.info.Ordinal, "error", err)
	}
}

// countLocked has the account of a tier count x as its owner's, and no other one, with Device.mu held.
func (d *Device) countLocked(x *Extent, in Tier) {
	d.ownLocked(x.counted, x.owner, -x.size)
	d.ownLocked(in, x.owner, x.size)
	x.counted = in
}

// ownLocked says that a tenant owns n more bytes of a tier, with Device.mu held.
func (d *Device) ownLocked(in Tier, id tenants.ID, n int64) {
	switch in {
	case TierVRAM:
		d.ledger.Add(id, n)
	case TierHost:
		d.pinned.own(id, n)
	}
}

// takenLocked counts n more bytes of a tier, with Device.mu held.
func (d *Device) takenLocked(t Tier, n int64) {
	if t == TierHost {
		d.takenHost += n
	} else {
		d.taken += n
	}
}

// Copied reports whether somebody uses x besides its Key and those who map it.
func (x *Extent) Copied() bool {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	return x.copiedLocked()
}

// copiedLocked is Copied for those who hold Device.mu.
func (x *Extent) copiedLocked() bool { return int(x.users.Load()) > 1+x.mapped }

// Mapped returns how many Pins there are.
func (x *Extent) Mapped() int {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	return x.mapped
}

// Leave has the Key let go of x, which the Key has. It reports false, and x stays, where somebody maps it and the
// device is not lost.
func (x *Extent) Leave(lost bool) bool {
	d := x.dev
	d.mu.Lock()
	if x.mapped > 0 && !lost {
		d.mu.Unlock()
		return false
	}
	d.leaveLocked(x)
	d.mu.Unlock()
	x.LetGo()
	return true
}

// Accessed tells the rule that so many bytes of x were accessed, with write: that some of them were changed.
func (x *Extent) Accessed(bytes int64, write bool) {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	if x.state == held {
		x.written = x.written || write
		x.dev.rule.Note(policy.Event{Kind: policy.Accessed, ID: x.id, Bytes: bytes, Write: write})
	}
}

// leaveLocked takes x off the device's list, with Device.mu held.
func (d *Device) leaveLocked(x *Extent) {
	x.state = left
	delete(d.extents, x.id)
	d.countLocked(x, TierNone)
	d.leaving++
	d.left++
	d.rule.Note(policy.Event{Kind: policy.Left, ID: x.id})
	d.rule.Note(policy.Event{Kind: policy.Forgotten, ID: x.id}) // what comes for these pages is another extent
	d.checkLocked()
}

// place changes where x is, and tells those who map it. Nobody copies from or to x meanwhile.
func (x *Extent) place(tier Tier, mem gpubackend.Memory) {
	next := Placement{Tier: tier, Memory: mem, Generation: 0}
	if was := x.placement.Load(); was != nil {
		next.Generation = was.Generation + 1
	}
	x.placement.Store(&next)
	x.dev.mu.Lock()
	watches := slices.Clone(x.watches)
	x.dev.mu.Unlock()
	for _, p := range watches {
		p.told(x, next)
	}
}
