package residency

import (
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Pinned is the pinned host memory that the devices of a mount share. Pinning takes long, so memory that an extent
// gives back is kept for the next one, and some is made ahead of need (ahead.go), until Trim finds that it went unused.
// Its methods may be called from any goroutine.
type Pinned struct {
	mu    sync.Mutex
	limit int64 // bytes; protected by mu
	used  int64 // bytes, spares and locked pages of files included; protected by mu
	// hot is the bytes of locked pages of hot files, which are not part of used; hotRetired is those of them that are
	// retired. Protected by mu.
	hot, hotRetired int64
	spares          []spare       // the longest unused comes first; protected by mu
	changed         chan struct{} // closed by notify; nil while nobody watches. Protected by mu
	// ledger has who owns how much of extents' memory. Protected by mu.
	ledger  *tenants.Ledger
	devices []*Device // the devices that use it; protected by mu
	// files has the memory of locked files; share is the part that one user's files may have. Protected by mu.
	files map[*FileMemory]struct{}
	share float64
	// working has an element for each spare that is being made, its size, and for spares that are being freed, 0. The
	// channel is closed when that is done. Protected by mu.
	working map[chan struct{}]int64
}

// spare is memory that no extent has.
type spare struct {
	dev   *Device
	mem   gpubackend.Memory
	had   []uint32 // users that may have been given it, and may have it still
	since time.Time
	fresh bool // no extent had it
}

// NewPinned returns an empty pool of at most limit bytes.
func NewPinned(limit int64) *Pinned {
	ledger, _ := tenants.New(limit, nil) // without tenants, New cannot fail
	return &Pinned{limit: limit, share: 1, ledger: ledger, working: make(map[chan struct{}]int64),
		files: make(map[*FileMemory]struct{})}
}

// SetTenants sets the tenants' maxima. A tenant over its new maximum keeps what it owns until it asks for more.
func (p *Pinned) SetTenants(list []tenants.Tenant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ledger.Configure(tenants.OfPinned(list))
}

// Tenants returns how much each tenant owns of extents' memory.
func (p *Pinned) Tenants() []tenants.Account {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Accounts()
}

// own adds n bytes to what a tenant owns or asks for. n may be negative.
func (p *Pinned) own(id tenants.ID, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ledger.Add(id, n)
}

// overdrawn reports whether a tenant owns more than its maximum.
func (p *Pinned) overdrawn(id tenants.ID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Over(id)
}

// limits reports whether a tenant has a maximum.
func (p *Pinned) limits(id tenants.ID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Most(id) > 0
}

// most returns how many bytes a tenant may own, at most the pool's limit.
func (p *Pinned) most(id tenants.ID) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if most := p.ledger.Most(id); most > 0 {
		return min(most, p.forExtentsLocked())
	}
	return p.forExtentsLocked()
}

// victims is Ledger.Victims.
func (p *Pinned) victims(asks tenants.ID) []tenants.ID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.Victims(asks)
}

// devicesFrom returns d, and then the other devices that have extents in p.
func (p *Pinned) devicesFrom(d *Device) []*Device {
	p.mu.Lock()
	all := p.devices // only grows
	p.mu.Unlock()
	list := []*Device{d}
	for _, of := range all {
		if of != d && of.hosts() {
			list = append(list, of)
		}
	}
	return list
}

// use adds d to the devices that use p.
func (p *Pinned) use(d *Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = append(p.devices, d)
}

// Limit returns the limit of the pool in bytes.
func (p *Pinned) Limit() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.limit
}

// SetLimit changes the limit. It frees spares while more is in use than the limit. Device.Trim evicts extents for the
// rest.
func (p *Pinned) SetLimit(bytes int64) {
	p.mu.Lock()
	p.limit = bytes
	p.ledger.Resize(bytes)
	p.mu.Unlock()
	_ = p.room(0, nil) // fails if extents alone exceed the limit
	p.notify()
}

// Over reports whether more is used than the limit, apart from retired memory. It frees spares first.
func (p *Pinned) Over() bool {
	if p.room(0, nil) == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used-p.retiredLocked() > p.limit
}

// Used returns the bytes that are pinned now, and how many of them are spares.
func (p *Pinned) Used() (used, spare int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used, p.sparesLocked()
}

func (p *Pinned) sparesLocked() (bytes int64) {
	for _, s := range p.spares {
		bytes += s.mem.Size()
	}
	return bytes
}

// nobody is the user of memory that must be free of everyone else: no client has this ID.
const nobody = math.MaxUint32

// take returns memory for an extent of d that user will be given: a spare, or new memory. If littered is false, it is
// zeros. ErrNoMemory of gpubackend if the limit is reached or the host refuses.
func (p *Pinned) take(d *Device, size int64, user uint32) (mem gpubackend.Memory, littered bool, err error) {
	if s, ok := p.recycle(d, size, user); ok {
		if s.fresh {
			d.Expect(size)
			return s.mem, !s.mem.Zeroed(), nil
		}
		return s.mem, true, nil
	}
	if err := p.room(size, nil); err != nil {
		return nil, false, err
	}
	if mem, err = d.backend.AllocHost(size); err != nil {
		p.unused(size)
		return nil, false, err
	}
	d.Expect(size)
	return mem, !mem.Zeroed(), nil
}

// recycle takes a spare that may be given to user.
func (p *Pinned) recycle(d *Device, size int64, user uint32) (spare, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.spares) - 1; i >= 0; i-- {
		s := p.spares[i]
		if s.dev == d && s.mem.Size() == size && d.passesTo(user, s.mem, s.had) {
			p.spares = slices.Delete(p.spares, i, i+1)
			return s, true
		}
	}
	return spare{}, false
}

// room counts size more bytes as used, for m if that is not nil. If the limit is reached, it frees spares, and waits
// for those that are being made or freed.
func (p *Pinned) room(size int64, m *FileMemory) error {
	for {
		p.mu.Lock()
		if p.used+size <= p.limit {
			if p.used += size; m != nil {
				m.used = true
			}
			p.mu.Unlock()
			return nil
		}
		n := 0
		for over := p.used + size - p.limit; over > 0 && n < len(p.spares); n++ {
			over -= p.spares[n].mem.Size()
		}
		gone := slices.Clone(p.spares[:n])
		p.spares = slices.Delete(p.spares, 0, n)
		var done chan struct{}
		for done = range p.working {
			break
		}
		p.mu.Unlock()
		switch {
		case n > 0:
			p.drop(gone)
		case done != nil:
			<-done
		default:
			return gpubackend.ErrNoMemory
		}
	}
}

// begin notes that a spare of so many bytes is being made, or with 0, that some are being freed. p.mu is held. end does
// not need it.
func (p *Pinned) begin(makes int64) (end func()) {
	done := make(chan struct{})
	p.working[done] = makes
	return func() {
		p.mu.Lock()
		delete(p.working, done)
		p.mu.Unlock()
		close(done)
	}
}

// put keeps memory of an extent of d as a spare. had are the users that may have been given it.
func (p *Pinned) put(d *Device, mem gpubackend.Memory, had []uint32) {
	p.mu.Lock()
	p.spares = append(p.spares, spare{dev: d, mem: mem, had: had, since: time.Now()})
	p.mu.Unlock()
	p.notify()
}

// drop frees spares that the caller took from the list.
func (p *Pinned) drop(gone []spare) {
	p.mu.Lock()
	end := p.begin(0)
	p.mu.Unlock()
	defer end()
	for _, s := range gone {
		size := s.mem.Size()
		if err := s.mem.Free(); err != nil && !errors.Is(err, gpubackend.ErrDeviceLost) {
			s.dev.options.Log.Warn("freeing pinned memory", "device", s.dev.info.Ordinal, "error", err)
		}
		p.unused(size)
	}
}

func (p *Pinned) unused(n int64) {
	p.mu.Lock()
	p.used -= n
	p.mu.Unlock()
	p.notify()
}

// Trim frees spares that have not been used for the given time.
func (p *Pinned) Trim(unused time.Duration) {
	p.mu.Lock()
	n := 0
	for n < len(p.spares) && time.Since(p.spares[n].since) >= unused {
		n++
	}
	gone := slices.Clone(p.spares[:n])
	p.spares = slices.Delete(p.spares, 0, n)
	p.mu.Unlock()
	p.drop(gone)
}

// watch returns a channel that is closed when memory may have become free on any device.
func (p *Pinned) watch() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.watchLocked()
}

func (p *Pinned) watchLocked() <-chan struct{} {
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

func (p *Pinned) notify() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.notifyLocked()
}

func (p *Pinned) notifyLocked() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}
