package residency

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Options say how the memory of a device is shared out.
type Options struct {
	// Share is the part of the memory that a limited Tenant may map: all of it is 1.
	Share float64
	// Eviction is the name of the policy.Rule that chooses victims. "" stands for policy.Default.
	Eviction string
	// Patience is how long a reservation waits for memory that is about to be free.
	Patience func() time.Duration
	// Pinned is the pinned memory of the host that devices share. nil stands for none.
	Pinned *Pinned
	// Tenants are those that are configured; tenants.Check found nothing wrong.
	Tenants []tenants.Tenant
	// Recall has clients end the brackets that they keep without need, before a victim is looked for. nil stands for
	// nothing to do. It is called without locks, and may wait for clients.
	Recall func(ctx context.Context)
	// Log receives what nobody waits for.
	Log *slog.Logger
}

// Device is the memory of a gpubackend.Device. Its methods may be called from any goroutine.
type Device struct {
	// immutable
	backend gpubackend.Device
	info    gpubackend.Info
	options Options // but for Tenants, which mu protects
	pinned  *Pinned

	// budgeting is held while the budget changes, or what is guaranteed of it, before mu. Of several devices: in the
	// order of the cache.
	budgeting sync.Mutex

	mu       sync.Mutex
	live     *live                 // the budget follows what others take; nil: it does not. Protected by mu
	budget   int64                 // bytes of the device's own memory that may be used; protected by mu
	why      string                // where budget comes from, for people; protected by mu
	share    float64               // the part of it that a limited Tenant may map; protected by mu
	rule     policy.Rule           // protected by mu
	eviction string                // its name; protected by mu
	lowest   int                   // of the priorities that Keys have; protected by mu
	ledger   *tenants.Ledger       // who owns what of extents that are made or placed; protected by mu
	extents  map[policy.ID]*Extent // that Keys have; protected by mu
	named    policy.ID             // the last one; protected by mu
	charges  map[uint32]int64      // bytes that the programs of each user map; protected by mu
	mapped   int64                 // bytes of extents that somebody maps; protected by mu
	taken    int64                 // bytes of the device's own memory of extents that are not freed; protected by mu
	// takenHost is taken of pinned memory, movedIn and movedOut are the bytes that moved from there, and there.
	// Protected by mu.
	takenHost, movedIn, movedOut int64
	line                         []*Asking           // of grants, the first to go first; protected by mu
	grants                       map[*Grant]struct{} // that were not given back; protected by mu
	// since when much of the budget is free; zero: it is not. Protected by mu
	roomy   time.Time
	making  int // extents that are made; protected by mu
	leaving int // extents that left and are not freed; protected by mu
	left    int // extents that ever left; protected by mu
	// of reservations that need room; the first has the turn, and is closed. Protected by mu
	turns      []chan struct{}
	stock      *stock                                       // of the grant that has the turn, or nil; protected by mu
	departures map[departure]struct{ Extents, Bytes int64 } // since the device was made; protected by mu
	overBus    OverBus                                      // protected by mu
	// promised is what the reservation that has the turn has made free so far. Protected by mu.
	promised int64
	// freed has an element when memory was given back, or is known not to be.
	freed chan struct{}
}

// New returns the memory of d, of which nothing is used. It fails where there is no rule of the name.
func New(d gpubackend.Device, o Options) (*Device, error) {
	rule, err := newRule(o.Eviction)
	if err != nil {
		return nil, err
	}
	if o.Pinned == nil {
		o.Pinned = NewPinned(0)
	}
	if o.Recall == nil {
		o.Recall = func(context.Context) {}
	}
	info := d.Info()
	ledger, err := tenants.New(info.Memory, o.Tenants)
	if err != nil {
		return nil, err
	}
	o.Pinned.SetTenants(o.Tenants)
	made := &Device{
		backend: d, info: info, options: o, budget: info.Memory, share: o.Share, pinned: o.Pinned,
		grants: make(map[*Grant]struct{}), departures: make(map[departure]struct{ Extents, Bytes int64 }),
		rule: rule, eviction: o.Eviction, ledger: ledger,
		extents: make(map[policy.ID]*Extent), charges: make(map[uint32]int64), freed: make(chan struct{}, 1),
	}
	o.Pinned.use(made)
	return made, nil
}

func newRule(name string) (policy.Rule, error) {
	return policy.New(cmp.Or(name, policy.Default), policy.Options{Seed: rand.Uint64()})
}

// SetEviction has another rule choose victims from now on. It begins with the extents in the order in which they were
// placed, and knows nothing of what happened to them since.
func (d *Device) SetEviction(name string) error {
	rule, err := newRule(name)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(d.extents)) {
		x := d.extents[id]
		rule.Note(policy.Event{Kind: policy.Placed, ID: id, Bytes: x.size})
		if x.mapped > 0 {
			rule.Note(policy.Event{Kind: policy.Mapped, ID: id})
		}
	}
	d.rule, d.eviction = rule, name
	return nil
}

// SetTenants replaces what is configured of tenants on all the devices. It changes nothing where CheckTenants of one
// finds something wrong. No budget changes meanwhile.
func SetTenants(devices []*Device, list []tenants.Tenant) error {
	for _, d := range devices {
		d.budgeting.Lock()
		defer d.budgeting.Unlock()
	}
	for _, d := range devices {
		if err := d.CheckTenants(list); err != nil {
			return err
		}
	}
	for _, d := range devices {
		d.mu.Lock()
		d.options.Tenants = list
		d.ledger.Configure(list)
		d.pinned.SetTenants(list)
		d.mu.Unlock()
	}
	return nil
}

// CheckTenants says what is wrong with a list of tenants, for this device.
func (d *Device) CheckTenants(list []tenants.Tenant) error {
	if err := tenants.CheckFor(d.Budget(), list); err != nil {
		return refuse(syscall.EINVAL, "device %d: %v", d.info.Ordinal, err)
	}
	return nil
}

// SetLowest says what the lowest priority is that a Key may have. It is 0 at first.
func (d *Device) SetLowest(priority int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lowest = priority
}

// Account returns on whose account the memory of a process is. EACCES where it may not be the tenant that it names.
func (d *Device) Account(p tenants.Process) (tenants.ID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	id, err := tenants.Find(d.options.Tenants, p)
	if err != nil {
		return "", refuse(syscall.EACCES, "%v", err)
	}
	return id, nil
}

// UserPins is how much of a device the programs of one user map. An extent that several map counts once for each user.
type UserPins struct {
	User  uint32 `json:"user"`
	Bytes int64  `json:"bytes"`
}

// Status is how much of a device's memory is used for what.
type Status struct {
	// Eviction is the rule that chooses victims.
	Eviction string
	// Budget is the bytes of the device's own memory that may be used, Why says where it comes from.
	Budget  int64
	Why     string
	Extents int
	Mapped  int64 // bytes of those that clients map
	// Pinned is the bytes of extents in pinned memory of the host. MovedOut are the bytes that moved there from the
	// device's own memory so far, MovedIn those that moved back.
	Pinned, MovedIn, MovedOut int64
	// Departures is what left the device's own memory, or pinned memory, and why.
	Departures []Departure
	OverBus    OverBus
	Brackets   int // grants that were not given back
	Waiting    int // grants that are waited for
	Users      []UserPins
	// Pins is what extents of pinned Keys take on each user's account, PinnedIdle what nobody maps of them and stays.
	Pins       []UserPins
	PinnedIdle int64
	// Tenants is who owns how much: of extents that are mapped, who mapped them first, and of the others, who did so
	// last.
	Tenants []tenants.Account
}

// Eviction returns the name of the rule that chooses victims.
func (d *Device) Eviction() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return cmp.Or(d.eviction, policy.Default)
}

// Status returns what is so at the moment.
func (d *Device) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{
		Eviction: cmp.Or(d.eviction, policy.Default), Extents: len(d.extents), Mapped: d.mapped,
		Tenants: d.ledger.Accounts(),
		Budget:  d.budget, Why: d.why,
		Users:  make([]UserPins, 0, len(d.charges)),
		Pinned: d.takenHost, MovedIn: d.movedIn, MovedOut: d.movedOut, Brackets: len(d.grants), Waiting: len(d.line),
	}
	for user, n := range d.charges {
		s.Users = append(s.Users, UserPins{user, n})
	}
	slices.SortFunc(s.Users, func(a, b UserPins) int { return cmp.Compare(a.User, b.User) })
	s.Departures, s.OverBus = d.departuresLocked(), d.overBus
	s.Pins, s.PinnedIdle = d.pinsLocked().sums()
	return s
}

// wake has the reservation that waits for memory look again.
func (d *Device) wake() {
	select {
	case d.freed <- struct{}{}:
	default:
	}
	d.pinned.notify()
}
