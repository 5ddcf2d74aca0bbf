package residency

import (
	"context"
	"math"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency/quanta"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Programs of one tenant whose memory does not fit together use the device by turns; package quanta has the rules. A
// grant that lacks memory waits until its client may take some, for at most one quantum. Then it goes on as if there
// were no quanta, except that it takes nothing from a client that has one. A tenant's quanta do not concern others:
// if a tenant is above its share, others get what they are due at once.

// Client identifies a client that opens brackets; see Asking.
type Client = quanta.Client

const (
	// quantumTick is the longest pause between two looks at whether a quantum has ended.
	quantumTick = time.Millisecond
	// lookPart: looking takes no more than 1/lookPart of the time.
	lookPart = 16
	// recallPart: the first in line asks clients for the brackets that they keep after 1/recallPart of the longest
	// quantum.
	recallPart = 4
	// idlePart: a client with a quantum waits for open brackets for 1/idlePart of the longest one.
	idlePart = 4
)

// Quanta counts the grants that waited for a quantum.
type Quanta struct {
	Waits int64 `json:"waits"`
	// Given counts those that got one.
	Given int64 `json:"given"`
	// Seconds is how long all of them waited, and Longest the longest wait.
	Seconds float64 `json:"seconds"`
	Longest float64 `json:"longest_seconds"`
}

// SetQuantum changes the longest quantum. 0: there are none.
func (d *Device) SetQuantum(longest time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.quantum = longest
	for _, q := range d.quanta {
		q.Longest = longest
	}
}

// quantaLocked returns the quanta of a tenant. Device.mu is held.
func (d *Device) quantaLocked(of tenants.ID) *quanta.Quanta {
	if d.quanta[of] == nil {
		d.quanta[of] = &quanta.Quanta{Longest: d.quantum}
	}
	return d.quanta[of]
}

// lack is what a bracket lacks of the device's own memory, while it asks for it.
type lack struct {
	bytes int64
	had   int64 // bytes that were there
}

// lacks returns what wants lack, without what stays in pinned memory.
func (d *Device) lacks(wants []Want, stay delayed) (l lack) {
	for _, w := range wants {
		pieces, _ := plan(w.Key.Extents(Aligned(w.Pages, w.Size)), w.Pages, w.Size, d.info.Granularity, math.MaxInt64)
		for _, of := range pieces {
			switch {
			case of.x != nil && of.x.Placement().Tier == TierVRAM:
				l.had += of.bytes()
			case !w.Key.Preference().OnHost && !stay.has(w.Key, of.pages):
				l.bytes += of.bytes()
			}
		}
	}
	return l
}

// hasQuantum reports whether the client that asks has a quantum.
func (d *Device) hasQuantum(a *Asking) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.quantaLocked(a.By.id()).Protected(a.Client, time.Now())
}

// awaitQuantum lets a grant that lacks memory wait until its client may take some of its own tenant, if that would have
// to give way. It reports whether the client has a quantum. It waits for at most the longest quantum, and for half of
// the grant's patience. The caller holds nothing. Errors are those of ctx.
func (d *Device) awaitQuantum(ctx context.Context, a *Asking, l lack) (has bool, err error) {
	w := quantumWait{d: d, a: a, began: time.Now()}
	d.mu.Lock()
	defer d.mu.Unlock()
	w.q = d.quantaLocked(a.By.id())
	w.q.Ask(a.Client, w.began, l.bytes, d.awayLocked(a.Client))
	if a.Client == 0 || d.quantum == 0 || l.bytes == 0 || a.Nested || d.fitsLocked(l.bytes) ||
		!d.paysLocked(a, l.bytes) {
		return w.q.Protected(a.Client, w.began), nil
	}
	w.q.Press(w.began)
	most := w.began.Add(min(d.quantum, a.Patience/2))
	for {
		now := time.Now()
		may, has, again := w.mayLocked(now, l)
		if may || !now.Before(most) {
			w.endLocked(may, now)
			return has, nil
		}
		recalls := w.queueLocked(now)
		tick := quantumTick
		if !w.first.IsZero() {
			tick /= 4
		}
		tick = max(min(tick, again.Sub(now)), lookPart*time.Since(now))
		d.mu.Unlock()
		if recalls {
			d.options.Recall(ctx, nil) // a client that does nothing may keep brackets
		}
		select {
		case <-time.After(tick):
		case <-ctx.Done():
		}
		d.mu.Lock()
		if err := ctx.Err(); err != nil {
			w.endLocked(false, time.Now())
			return false, err
		}
	}
}

// quantumWait is a grant's wait for a quantum.
type quantumWait struct {
	d     *Device
	q     *quanta.Quanta
	a     *Asking
	began time.Time
	waits bool
	// first is when the grant was seen to be the first in line, recalled that clients were asked for kept brackets.
	first    time.Time
	recalled bool
}

// mayLocked reports whether the grant may go on, and whether its client has a quantum. Clients that are not hungry need
// none, but wait until there is memory that they may take. Device.mu is held.
func (w *quantumWait) mayLocked(now time.Time, l lack) (may, has bool, again time.Time) {
	if w.q.Hungry(w.a.Client) || w.q.Protected(w.a.Client, now) {
		may, again = w.q.May(w.a.Client, now, func() bool {
			_, all := w.d.spareLocked(w.a, now, false)
			return all > 0 && len(w.d.line) == 0
		})
		return may, may, again
	}
	if !w.q.Any(now) {
		return true, false, now
	}
	idle, _ := w.d.spareLocked(w.a, now, true)
	return idle >= l.bytes, false, now.Add(quantumTick)
}

// queueLocked begins the wait, if it has not begun. It reports whether it is time to ask clients for the brackets that
// they keep. Device.mu is held.
func (w *quantumWait) queueLocked(now time.Time) (recalls bool) {
	if !w.waits {
		w.waits = true
		w.d.queued++
		if !w.q.Skips(w.a.Client) {
			w.q.Queue(w.a.Client)
		}
	}
	if w.first.IsZero() && w.q.First(w.a.Client) {
		w.first = now
	}
	recalls = !w.first.IsZero() && !w.recalled && now.Sub(w.first) >= w.d.quantum/recallPart
	w.recalled = w.recalled || recalls
	return recalls
}

// endLocked ends the wait, and counts it. Device.mu is held.
func (w *quantumWait) endLocked(may bool, now time.Time) {
	if !w.waits {
		return
	}
	w.q.Leave(w.a.Client)
	took, all := now.Sub(w.began).Seconds(), &w.d.waited
	w.d.queued--
	all.Waits++
	if may {
		all.Given++
	}
	all.Seconds += took
	all.Longest = max(all.Longest, took)
}

// bringIn brings to the device what a client with a quantum has in pinned memory, and makes room for it. If brackets of
// clients without a quantum have the memory, they get no new ones meanwhile.
func (d *Device) bringIn(ctx context.Context, wants []Want, a *Asking, l lack) error {
	d.mu.Lock()
	idle, all := d.spareLocked(a, time.Now(), false)
	d.mu.Unlock()
	if idle < min(l.bytes, all) {
		if err := d.queue(ctx, a); err != nil {
			return err
		}
		err := d.awaitIdle(ctx, a, l)
		d.unqueue(a)
		if err != nil {
			return err
		}
	}
	a.brings = time.Now()
	return d.swapIn(ctx, wants, a, nil)
}

// awaitIdle waits until brackets of clients without a quantum have given back what a client that has one lacks. The
// client is first in line. It waits for a part of the longest quantum.
func (d *Device) awaitIdle(ctx context.Context, a *Asking, l lack) error {
	most := time.After(min(d.longestQuantum(), a.Patience) / idlePart)
	for recalled := false; ; {
		changed := d.pinned.watch()
		d.mu.Lock()
		idle, all := d.spareLocked(a, time.Now(), false)
		d.mu.Unlock()
		if idle >= min(l.bytes, all) {
			return nil
		}
		if !recalled {
			recalled = true
			d.options.Recall(ctx, d.spares(a.Client, a.By.id()))
			continue
		}
		select {
		case <-changed:
		case <-time.After(quantumTick): // a quantum has ended
		case <-most:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// spares returns a function that reports whether a client need not be asked for the brackets that it keeps, because
// another client of the tenant asks, and a quantum protects it. nil: all are to be asked.
func (d *Device) spares(by Client, asks tenants.ID) func(Client) bool {
	if by == 0 {
		return nil
	}
	return func(c Client) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return c != by && d.quantaLocked(asks).Protected(c, time.Now())
	}
}

func (d *Device) longestQuantum() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.quantum
}

// fitsLocked reports whether there is room for so many bytes. Device.mu is held.
func (d *Device) fitsLocked(bytes int64) bool { return d.taken+d.promised+bytes <= d.budget }

// awayLocked returns how many bytes a client has in pinned memory. Device.mu is held.
func (d *Device) awayLocked(c Client) (bytes int64) {
	if c == 0 || d.takenHost == 0 || d.delays != nil { // the threshold decides what is brought back
		return 0
	}
	for _, x := range d.extents {
		if x.client == c && x.Placement().Tier == TierHost {
			bytes += x.size
		}
	}
	return bytes
}

// paysLocked reports whether other clients of the same tenant have memory, and the tenant would have to give way to its
// own request. Device.mu is held.
func (d *Device) paysLocked(a *Asking, bytes int64) bool {
	id := a.By.id()
	d.ledger.Add(id, bytes)
	defer d.ledger.Add(id, -bytes)
	if order := d.ledger.Victims(id); len(order) == 0 || order[0] != id {
		return false
	}
	for _, x := range d.extents {
		if x.owner == id && x.client != a.Client && x.Placement().Tier == TierVRAM {
			return true
		}
	}
	return false
}

// spareLocked returns how many bytes of the device's own memory a grant may take: what is free, and what its tenant has
// and no quantum protects, without the client's own unless own is set. all includes what is mapped, idle does not.
// Device.mu is held.
func (d *Device) spareLocked(a *Asking, now time.Time, own bool) (idle, all int64) {
	id := a.By.id()
	q := d.quantaLocked(id)
	all = max(d.budget-d.taken-d.promised, 0)
	idle = all
	for _, x := range d.extents {
		if x.owner != id || x.Placement().Tier != TierVRAM || q.Protected(x.client, now) && x.client != a.Client ||
			x.client == a.Client && !own {
			continue
		}
		all += x.size
		if x.mapped == 0 {
			idle += x.size
		}
	}
	return idle, all
}

// standing says how a victim's client stands to the one that asks, from first to last.
type standing uint8

const (
	ofOthers standing = iota // who may be taken from
	ofItself
	isProtected // by a quantum
)

// standingLocked returns how x stands to the client that asks for memory of a tenant. Device.mu is held.
func (d *Device) standingLocked(x *Extent, c Client, asks tenants.ID, now time.Time) standing {
	switch {
	case c == 0 || d.quantum == 0 || x.owner != asks:
		return ofOthers
	case x.client == c:
		return ofItself
	case d.quantaLocked(asks).Protected(x.client, now):
		return isProtected
	}
	return ofOthers
}

// swapIn makes room for extents of wants that are in pinned memory, by evicting what other clients of the tenant have
// and no quantum protects. Then it moves them, and keeps them for keep, if that is not nil.
func (d *Device) swapIn(ctx context.Context, wants []Want, a *Asking, keep *Pin) error {
	for _, w := range wants {
		if w.Key.Preference().OnHost {
			continue
		}
		for _, x := range w.Key.Extents(w.Pages) {
			if x.Placement().Tier != TierHost || x.Mapped() > 0 || a.stay.has(x.key, x.pages) {
				continue
			}
			if ok, err := d.swapOne(ctx, x, a, keep != nil); !ok || err != nil {
				return err
			}
			if keep != nil {
				keep.keepOwn(x)
			}
		}
	}
	return nil
}

// swapOne is swapIn for one extent. It reports false if there is no room. With exchange, a tenant that may own no more
// of the device gives other extents for this one.
func (d *Device) swapOne(ctx context.Context, x *Extent, a *Asking, exchange bool) (bool, error) {
	id := a.By.id()
	mine, _, err := d.turn(ctx)
	if err != nil {
		return false, err
	}
	defer d.yield(mine)
	if exchange {
		d.unclaim(id, -x.size) // counts as owned while victims are chosen, also beyond the maximum
		defer d.unclaim(id, x.size)
	}
	for d.room() < x.size || exchange && d.over(id) {
		but := sparing{copied: true, by: a.Client, own: true}
		ok, err := d.evict(ctx, TierVRAM, id, ForBracket, but, x.size-d.room())
		if !ok || err != nil {
			return false, err
		}
	}
	if !exchange {
		if !d.claim(id, x.size) {
			return false, nil
		}
		defer d.unclaim(id, x.size)
	}
	d.bring(ctx, x)
	return true, nil
}

// readyLocked tells the quanta how long it took to bring what a grant lacked. Device.mu is held.
func (d *Device) readyLocked(g *Grant, now time.Time) {
	g.asked = false
	moved := max(g.bytes-g.pinned-g.had, 0)
	d.quantaLocked(g.by).Ready(g.client, now, moved, now.Sub(g.brings))
}

// Ready notes that everything that the grant has is up to date.
func (g *Grant) Ready() {
	d := g.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if g.asked {
		d.readyLocked(g, time.Now())
	}
}

// MayKeep reports whether the client may keep the grant beyond the end of the bracket, as Quanta.MayKeep says.
func (g *Grant) MayKeep() bool {
	d, now := g.dev, time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.quantaLocked(g.by).MayKeep(g.client, now)
}

// Keep notes that the client may end the bracket without telling.
func (g *Grant) Keep() {
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	g.kept = true
	g.dev.quantaLocked(g.by).Keep(g.client)
}
