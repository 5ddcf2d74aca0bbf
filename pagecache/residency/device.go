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

// Options configure how the memory of a device is shared out.
type Options struct {
	// Share is the part of the memory that a limited Tenant may map; 1 is all of it.
	Share float64
	// Eviction names the policy.Rule that chooses victims. "" means policy.Default.
	Eviction string
	// Patience is how long a reservation waits for memory that is about to be free.
	Patience func() time.Duration
	// Pinned is the pinned host memory that the devices share. nil means none.
	Pinned *Pinned
	// Tenants are the configured tenants. tenants.Check has accepted them.
	Tenants []tenants.Tenant
	// Delay says when extents that brackets use move to the device's own memory.
	Delay Delay
	// Recall asks clients to end the brackets that they keep without need. It is called before a victim is chosen,
	// without locks, and may wait for clients. nil means that there is nothing to recall.
	Recall func(ctx context.Context)
	// Name returns the name of a process for messages, or "". nil: none has a name.
	Name func(process uint32) string
	// Log receives messages that no caller waits for.
	Log *slog.Logger
}

// Device manages the memory of a gpubackend.Device. Its methods may be called from any goroutine.
type Device struct {
	// immutable
	backend gpubackend.Device
	info    gpubackend.Info
	options Options // except Tenants, which mu protects
	pinned  *Pinned
	ahead   ahead // Pinned.mu protects its fields

	// budgeting is held while the budget or the guarantees change. It comes before mu. Whoever locks it on several
	// devices does so in the order of the cache.
	budgeting sync.Mutex

	mu       sync.Mutex
	live     *live                 // set if the budget follows what others use; protected by mu
	budget   int64                 // bytes of the device's own memory that may be used; protected by mu
	why      string                // where the budget comes from, for people; protected by mu
	share    float64               // the part of the budget that a limited Tenant may map; protected by mu
	rule     policy.Rule           // protected by mu
	eviction string                // the rule's name; protected by mu
	lowest   int                   // the lowest priority that a Key may have; protected by mu
	ledger   *tenants.Ledger       // who owns how much of extents being made or placed; protected by mu
	extents  map[policy.ID]*Extent // all that Keys have; protected by mu
	named    policy.ID             // the last ID given; protected by mu
	charges  map[uint32]int64      // bytes that each user's programs map; protected by mu
	mapped   int64                 // bytes of mapped extents; protected by mu
	taken    int64                 // bytes of the device's own memory in extents not yet freed; protected by mu
	// takenHost is like taken, for pinned memory. movedIn and movedOut are the bytes moved from pinned memory and to
	// it. Protected by mu.
	takenHost, movedIn, movedOut int64
	line                         []*Asking           // of grants, the first to go first; protected by mu
	grants                       map[*Grant]struct{} // that were not given back; protected by mu
	// since when much of the budget is free; zero if it is not. Protected by mu
	roomy   time.Time
	making  int // number of extents being made; protected by mu
	leaving int // number of extents that left and are not freed; protected by mu
	left    int // number of extents that ever left; protected by mu
	// of reservations that need room; the first has the turn, and its channel is closed. Protected by mu
	turns      []chan struct{}
	stock      *stock                                       // of the grant that has the turn, or nil; protected by mu
	departures map[departure]struct{ Extents, Bytes int64 } // since the device was made; protected by mu
	overBus    OverBus                                      // protected by mu
	delays     *delays                                      // nil: extents move with the first bracket; protected by mu
	delayed    Delayed                                      // protected by mu
	// promised is how many bytes the reservation that has the turn has freed so far. Protected by mu.
	promised int64
	// freed has an element when memory was freed, or when it turned out that some will not be freed.
	freed chan struct{}
}

// New returns an empty Device for d. It fails if there is no rule named o.Eviction.
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
		ahead: ahead{wanted: make(chan struct{}, 1)},
	}
	made.SetDelay(o.Delay)
	o.Pinned.use(made)
	return made, nil
}

func newRule(name string) (policy.Rule, error) {
	return policy.New(cmp.Or(name, policy.Default), policy.Options{Seed: rand.Uint64()})
}

// SetEviction makes another rule choose victims from now on. The new rule learns of the extents in the order in which
// they were placed, and of nothing else that happened to them except being mapped.
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
		if x.recallable {
			rule.Note(policy.Event{Kind: policy.Kept, ID: id})
		}
	}
	d.rule, d.eviction = rule, name
	return nil
}

// SetTenants replaces the configured tenants on all the devices. If CheckTenants of one device fails, it changes
// nothing. No budget changes meanwhile.
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

// CheckTenants returns an error if this device cannot have these tenants.
func (d *Device) CheckTenants(list []tenants.Tenant) error {
	if err := tenants.CheckFor(d.Budget(), list); err != nil {
		return refuse(syscall.EINVAL, "device %d: %v", d.info.Ordinal, err)
	}
	return nil
}

// SetLowest sets the lowest priority that a Key may have. It is 0 at first.
func (d *Device) SetLowest(priority int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lowest = priority
}

// Account returns the tenant that is charged for the memory of a process. EACCES if the process may not be the tenant
// that it names.
func (d *Device) Account(p tenants.Process) (tenants.ID, error) {
	d.mu.Lock()
	configured := d.options.Tenants // a list that never changes
	d.mu.Unlock()
	id, err := tenants.Find(configured, p)
	if err != nil {
		return "", refuse(syscall.EACCES, "%v", err)
	}
	return id, nil
}

// UserPins is how much of a device one user's programs map. An extent that several users map counts for each.
type UserPins struct {
	User  uint32 `json:"user"`
	Bytes int64  `json:"bytes"`
}

// Status is how the memory of a device is used.
type Status struct {
	// Eviction is the rule that chooses victims.
	Eviction string
	// Budget is how many bytes of the device's own memory may be used. Why tells where the budget comes from.
	Budget  int64
	Why     string
	Extents int
	Mapped  int64 // bytes of the extents that clients map
	// Pinned is the bytes of extents in pinned host memory. MovedOut counts the bytes that moved there from the
	// device's own memory so far, MovedIn those that moved back.
	Pinned, MovedIn, MovedOut int64
	// Departures counts the extents that left the device's own memory or pinned memory, by reason.
	Departures []Departure
	OverBus    OverBus
	// Threshold says that extents move only when policy.Threshold says so. Delayed counts those that did not.
	Threshold bool
	Delayed   Delayed
	Brackets  int // grants not yet given back
	Waiting   int // grants that clients wait for
	Users     []UserPins
	// Pins is the size of pinned Keys' extents by user. PinnedIdle is the bytes of those that nobody maps and that
	// stay.
	Pins       []UserPins
	PinnedIdle int64
	// Tenants is how much each tenant owns. A mapped extent belongs to the tenant that mapped it first, any other to
	// the tenant that had it last.
	Tenants []tenants.Account
}

// Eviction returns the name of the rule that chooses victims.
func (d *Device) Eviction() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return cmp.Or(d.eviction, policy.Default)
}

// Status returns the current status.
func (d *Device) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{
		Eviction: cmp.Or(d.eviction, policy.Default), Extents: len(d.extents), Mapped: d.mapped,
		Tenants: d.ledger.Accounts(),
		Budget:  d.budget, Why: d.why,
		Users:  make([]UserPins, 0, len(d.charges)),
		Pinned: d.takenHost, MovedIn: d.movedIn, MovedOut: d.movedOut, Brackets: len(d.grants),
		Waiting: len(d.line),
	}
	for user, n := range d.charges {
		s.Users = append(s.Users, UserPins{user, n})
	}
	slices.SortFunc(s.Users, func(a, b UserPins) int { return cmp.Compare(a.User, b.User) })
	s.Departures, s.OverBus = d.departuresLocked(), d.overBus
	s.Threshold, s.Delayed = d.delays != nil, d.delayed
	s.Pins, s.PinnedIdle = d.pinsLocked().sums()
	return s
}

// wake makes the reservation that waits for memory look again.
func (d *Device) wake() {
	select {
	case d.freed <- struct{}{}:
	default:
	}
	d.pinned.notify()
}
