package residency

import (
	"cmp"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/shortage"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Tenant is the one who is charged for memory.
type Tenant struct {
	User uint32
	// Limited means that the user may map no more than a share of the device.
	Limited bool
	// Process is the client's process, for messages; 0: none.
	Process uint32
	// Account names the tenant whose memory it is; "" means the user's.
	Account tenants.ID
}

// id returns the tenant's name in the ledger.
func (t Tenant) id() tenants.ID {
	if t.Account != "" {
		return t.Account
	}
	return tenants.User(t.User)
}

// Pin is a client's hold on extents. Pinned extents keep their memory. If their placement changes, Watch tells.
type Pin struct {
	dev     *Device
	by      Tenant
	stay    delayed   // what the grant uses in pinned memory; not nil: the bracket was counted as an access
	keeps   bool      // made by Keep; nobody is charged
	recalls bool      // Recall may end it; protected by Device.mu
	failed  bool      // of a failed attempt at a grant: its Free frees nothing that others wait for
	extents []*Extent // in the order of their pages
	// unzeroed is Request.Unzeroed. Immutable.
	unzeroed bool
	told     func(x *Extent, at Placement)
}

// Extents returns the pinned extents in the order of their pages.
func (p *Pin) Extents() []*Extent { return p.extents }

// Watch calls told for each extent with its current placement, and again whenever that changes, until Free. Watch makes
// the first calls itself; whoever moves an extent makes the later ones, without a lock of this package. A Pin can be
// watched once.
func (p *Pin) Watch(told func(x *Extent, at Placement)) {
	p.told = told
	for _, x := range p.extents {
		p.dev.mu.Lock()
		x.watches = append(x.watches, p)
		p.dev.mu.Unlock()
		told(x, x.Placement())
	}
}

// Accessed tells the device's rule that a program accesses the pages of rg.
func (p *Pin) Accessed(rg page.Range) { p.accessed([]page.Range{rg}, false) }

// Changed tells the device's rule that a program changed these pages, which are in order.
func (p *Pin) Changed(pages []page.Range) { p.accessed(pages, true) }

// Claimed tells the device's rule, and the threshold, that a program says it accessed the pages of rg n more times. n
// is at least 1.
func (p *Pin) Claimed(rg page.Range, n uint32) {
	p.each([]page.Range{rg}, func(x *Extent, bytes int64) { x.claimed(bytes, n) })
}

// accessed notes one access per extent.
func (p *Pin) accessed(pages []page.Range, write bool) {
	p.each(pages, func(x *Extent, bytes int64) { x.accessed(bytes, write, p.stay == nil || write) })
}

// each calls do for the extents that have some of the pages, with how many bytes those are.
func (p *Pin) each(pages []page.Range, do func(x *Extent, bytes int64)) {
	if len(pages) == 0 {
		return
	}
	from, _ := slices.BinarySearchFunc(p.extents, pages[0].Start,
		func(x *Extent, p page.Index) int { return cmp.Compare(x.pages.End, p+1) })
	for _, x := range p.extents[from:] {
		bytes := int64(0)
		for len(pages) > 0 && pages[0].Start < x.pages.End {
			bytes += pages[0].Intersect(x.pages).Bytes()
			if pages[0].End > x.pages.End {
				break // the range goes on in the next extent
			}
			pages = pages[1:]
		}
		if bytes > 0 {
			do(x, bytes)
		}
		if len(pages) == 0 {
			return
		}
	}
}

// Abandon calls Abandon of each extent.
func (p *Pin) Abandon() {
	for _, x := range p.extents {
		x.Abandon()
	}
}

// Free gives the extents back. It may be called once. It blocks as LetGo does.
func (p *Pin) Free() {
	for _, x := range p.extents {
		p.dev.mu.Lock()
		p.dev.unpinLocked(x, p)
		p.dev.mu.Unlock()
		x.LetGo()
	}
	p.extents = nil
}

// pin adds x to the Pin. It reports false if the Key has let go of x, or x is moving.
func (p *Pin) pin(x *Extent) (bool, error) {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if x.state != held || x.moving {
		return false, nil // a moving extent's Key holds its lock, so whoever asks the Key again waits
	}
	if x.pins[p.by.User] == 0 {
		if err := d.chargeLocked(p.by, x.size); err != nil {
			return false, err
		}
	}
	d.pinLocked(x, p)
	return true, nil
}

// pinLocked counts a Pin of an extent. Its user is charged already. Device.mu is held.
func (d *Device) pinLocked(x *Extent, p *Pin) {
	x.users.Add(1)
	if p.keeps {
		x.kept++
	} else {
		if !slices.Contains(x.had, p.by.User) {
			x.had = append(x.had, p.by.User)
		}
		x.pins[p.by.User]++
		x.mappers = append(x.mappers, p)
		d.ownFirstLocked(x)
	}
	if x.mapped++; x.mapped == 1 {
		d.mapped += x.size
		d.rule.Note(policy.Event{Kind: policy.Mapped, ID: x.id})
	}
	x.keptLocked()
	p.extents = append(p.extents, x)
	d.checkLocked()
}

// unpinLocked undoes pinLocked, except for users: the caller calls LetGo. Device.mu is held.
func (d *Device) unpinLocked(x *Extent, p *Pin) {
	if i := slices.Index(x.watches, p); i >= 0 {
		x.watches = slices.Delete(x.watches, i, i+1)
	}
	if p.keeps {
		x.kept--
	} else {
		d.unmappedLocked(x, p)
	}
	if p.recalls {
		x.recalls--
	}
	if x.mapped--; x.mapped == 0 {
		d.mapped -= x.size
		x.recallable = false
		if x.state == held {
			d.rule.Note(policy.Event{Kind: policy.Unmapped, ID: x.id})
		}
		if !p.failed {
			d.pinned.notify()
		}
	} else {
		x.keptLocked()
	}
	d.checkLocked()
}

// keptLocked tells the rule whether Recall may end all pins of x, unless it knows. x is mapped. Device.mu is held.
func (x *Extent) keptLocked() {
	recallable := x.recalls == x.mapped
	if x.state != held || recallable == x.recallable {
		return
	}
	x.recallable = recallable
	kind := policy.Mapped
	if recallable {
		kind = policy.Kept
	}
	x.dev.rule.Note(policy.Event{Kind: kind, ID: x.id})
}

// unmappedLocked removes p from the mappers of x. Device.mu is held.
func (d *Device) unmappedLocked(x *Extent, p *Pin) {
	by := p.by
	if x.pins[by.User]--; x.pins[by.User] == 0 {
		delete(x.pins, by.User)
		d.dischargeLocked(by, x.size)
	}
	i := slices.Index(x.mappers, p)
	x.mappers = slices.Delete(x.mappers, i, i+1)
	d.ownFirstLocked(x)
}

// ownFirstLocked charges x to the first of those who map it. If nobody maps x, its owner does not change. Device.mu is
// held.
func (d *Device) ownFirstLocked(x *Extent) {
	if len(x.mappers) == 0 || x.mappers[0].by.id() == x.owner {
		return
	}
	d.ownLocked(x.counted, x.owner, -x.size)
	x.owner = x.mappers[0].by.id()
	d.ownLocked(x.counted, x.owner, x.size)
}

// charge counts n more bytes that a user maps. ENOMEM if the user may not map them.
func (d *Device) charge(by Tenant, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.chargeLocked(by, n)
}

// chargeLocked is charge for callers that hold Device.mu.
func (d *Device) chargeLocked(by Tenant, n int64) error {
	if share := d.shareLocked(); by.Limited && d.charges[by.User]+n > share {
		return shortage.OverShare
	}
	d.charges[by.User] += n
	return nil
}

// dischargeLocked undoes a charge. Device.mu is held.
func (d *Device) dischargeLocked(by Tenant, n int64) {
	if d.charges[by.User] -= n; d.charges[by.User] == 0 {
		delete(d.charges, by.User)
	}
}
