package residency

import (
	"context"
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
	// TierNone means no memory: only home may have the bytes.
	TierNone Tier = iota
	// TierVRAM is the device's own memory.
	TierVRAM
	// TierHost is pinned host memory. Programs see it at the same addresses; it is slower.
	TierHost
)

// Placement is where the bytes of an extent are.
type Placement struct {
	Tier Tier
	// Memory is nil in TierNone.
	Memory gpubackend.Memory
	// Generation counts the extent's placements. The first one with memory is 1.
	Generation uint64
}

// state is an Extent's state; the package comment has the transitions. A held extent is mapped if it has pins, and idle
// otherwise.
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
	// littered means that the memory could hold old bytes when the extent was made. Immutable.
	littered bool

	// zeroed says that Zero has nothing to do: the memory has no old bytes, or x is littered. zeroing has an element
	// while somebody zeroes the memory.
	zeroed  atomic.Bool
	zeroing chan struct{} // immutable

	placement atomic.Pointer[Placement] // never nil; changed by place
	// users counts the Key, every Pin, and every copy in progress. The last one frees the memory.
	users atomic.Int32

	id         policy.ID      // protected by Device.mu
	owner      tenants.ID     // the first of mappers, or the last one there was; protected by Device.mu
	mappers    []*Pin         // except Keep's, in order; protected by Device.mu
	counted    Tier           // the tier in whose account x is counted, TierNone: in none; protected by Device.mu
	state      state          // protected by Device.mu
	pins       map[uint32]int // number of pins by user; protected by Device.mu
	kept       int            // number of pins that Keep made; protected by Device.mu
	mapped     int            // number of all pins, kept ones included; protected by Device.mu
	recalls    int            // number of pins that Recall may end; protected by Device.mu
	recallable bool           // the rule knows that Recall may end all pins; protected by Device.mu
	watches    []*Pin         // protected by Device.mu
	written    bool           // a program changed x since it was placed; protected by Device.mu
	moving     bool           // x is being copied to other memory; protected by Device.mu
	had        []uint32       // users that may have been given x's memory; protected by Device.mu
}

// Pages returns the pages of the file that x caches.
func (x *Extent) Pages() page.Range { return x.pages }

// Size returns the bytes of x. At the end of the largest possible file, that is more than its pages have.
func (x *Extent) Size() int64 { return x.size }

// Littered reports whether x could hold old bytes, rather than zeros, when it was made.
func (x *Extent) Littered() bool { return x.littered }

// Zero zeroes the memory of x, unless that was done or x is littered. Until then the memory may hold bytes of another
// file: it must not be exported, and the Key puts no bytes there, because Zero would overwrite them. The caller uses x.
// Several callers may ask at once: one of them zeroes, and the others wait for it as long as their contexts last. After
// an error any caller may try again.
func (x *Extent) Zero(ctx context.Context) error {
	if x.zeroed.Load() {
		return nil
	}
	select {
	case x.zeroing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-x.zeroing }()
	if x.zeroed.Load() {
		return nil
	}
	err := x.dev.backend.Zero(ctx, x.Memory(), 0, x.size)
	x.zeroed.Store(err == nil)
	return err
}

// Placement returns where the bytes are. It does not change while the caller uses x; see the package comment.
func (x *Extent) Placement() Placement { return *x.placement.Load() }

// Memory returns the Placement's Memory.
func (x *Extent) Memory() gpubackend.Memory { return x.placement.Load().Memory }

// Hold counts one more user, who copies from or to the memory. The Key or the caller uses x already.
func (x *Extent) Hold() { x.users.Add(1) }

// TryHold is Hold for a caller who does not use x. It reports false if nobody uses x: then the memory is being freed,
// or x moves. It needs no lock. So whoever wants to change x's placement must first make sure that no new caller tries,
// and then look for copies.
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

// dying in Extent.had stands for clients that ended without unmapping. No user has this number (chown(2)).
const dying = math.MaxUint32

// Abandon notes that a client that was given the memory ended without unmapping it. The client's kernels may store
// there for a while longer, whoever has the memory by then.
func (x *Extent) Abandon() {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	if !slices.Contains(x.had, dying) {
		x.had = append(x.had, dying)
	}
}

// LetGo ends one use. The last one frees the memory, and blocks until the device has done so.
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

// free gives memory to the grant that makes room, to the pool of pinned memory, or to the device. had are the users
// that may have been given it.
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

// freeOwn frees memory of the device's own.
func (d *Device) freeOwn(mem gpubackend.Memory) {
	if err := mem.Free(); err != nil {
		d.options.Log.Warn("freeing device memory", "device", d.info.Ordinal, "error", err)
	}
}

// countLocked counts x as its owner's in the account of one tier, and of no other. Device.mu is held.
func (d *Device) countLocked(x *Extent, in Tier) {
	d.ownLocked(x.counted, x.owner, -x.size)
	d.ownLocked(in, x.owner, x.size)
	x.counted = in
}

// ownLocked adds n bytes to what a tenant owns of a tier. Device.mu is held.
func (d *Device) ownLocked(in Tier, id tenants.ID, n int64) {
	switch in {
	case TierVRAM:
		d.ledger.Add(id, n)
	case TierHost:
		d.pinned.own(id, n)
	}
}

// takenLocked adds n to the bytes taken of a tier. Device.mu is held.
func (d *Device) takenLocked(t Tier, n int64) {
	if t == TierHost {
		d.takenHost += n
	} else {
		d.taken += n
	}
}

// Copied reports whether x is in use by anyone other than its Key and its Pins.
func (x *Extent) Copied() bool {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	return x.copiedLocked()
}

// copiedLocked is Copied for callers that hold Device.mu.
func (x *Extent) copiedLocked() bool { return int(x.users.Load()) > 1+x.mapped }

// Mapped returns the number of Pins.
func (x *Extent) Mapped() int {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	return x.mapped
}

// Leave makes the Key let go of x, which the Key has. If somebody maps x and the device is not lost, x stays, and Leave
// reports false.
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

// Accessed tells the rule that a program accessed so many bytes of x, and with write changed some of them.
func (x *Extent) Accessed(bytes int64, write bool) { x.accessed(bytes, write, true) }

// accessed is Accessed. Without counts, the threshold has counted this access already.
func (x *Extent) accessed(bytes int64, write, counts bool) {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	if x.state == held {
		if counts {
			x.dev.accessedLocked(x, write)
		}
		x.written = x.written || write
		x.dev.rule.Note(policy.Event{Kind: policy.Accessed, ID: x.id, Bytes: bytes, Write: write})
	}
}

// claimed notes that a program says it accessed so many bytes of x n more times.
func (x *Extent) claimed(bytes int64, n uint32) {
	x.dev.mu.Lock()
	defer x.dev.mu.Unlock()
	if x.state == held {
		x.dev.claimedLocked(x, n)
		x.dev.rule.Note(policy.Event{Kind: policy.Accessed, ID: x.id, Bytes: bytes, Claimed: n})
	}
}

// leaveLocked takes x off the device's list. Device.mu is held.
func (d *Device) leaveLocked(x *Extent) {
	x.state = left
	if x.Placement().Tier == TierVRAM {
		d.leftOwnLocked(x)
	}
	delete(d.extents, x.id)
	d.countLocked(x, TierNone)
	d.leaving++
	d.left++
	d.rule.Note(policy.Event{Kind: policy.Left, ID: x.id})
	d.rule.Note(policy.Event{Kind: policy.Forgotten, ID: x.id}) // the next extent for these pages is a new one
	d.checkLocked()
}

// place changes x's placement, and tells its watchers. Nobody copies from or to x meanwhile.
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
