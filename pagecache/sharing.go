package pagecache

import (
	"context"
	"errors"
	"iter"
	"os"
	"slices"
	"syscall"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/versions"
)

// Users of one file on one device share its memory, as programs on the CPU share the kernel's pages. But memory that
// was given to a program cannot be taken back: a program that keeps a descriptor sees whatever comes into that memory,
// and may store into it. So memory is not shared
//
//   - with users who had it before anybody lost rights to the file, because they may be the ones who lost them;
//   - with users who had it and unmapped it, once nobody maps it any more;
//   - with users who can store into it although they may not change the file. This happens if the device cannot keep a
//     program from writing to memory that it was given for reading.
//
// A user who must not share gets separate memory. If nobody maps the old memory, it goes. Otherwise the device gets one
// more holding of the file, with an owner of its own among those that lrc knows, and it is kept coherent with the first
// one as another device would be. Root and the daemon's own user share with everybody except users of the last kind,
// because they can reach everything anyway. Programs of one user always share: the kernel lets them reach each other's
// memory.

// given records that a user was given memory.
type given struct {
	taken uint64 // File.taken at that time
	// intruder says that the user can store there and must not.
	intruder bool
}

// errNotShared says that the memory was just given to another user who must not share it.
var errNotShared = errors.New("users who must not share memory map the file again and again")

// trusts reports whether a user can reach everything anyway.
func (c *Cache) trusts(user uint32) bool {
	return c.trustUsers || user == 0 || int(user) == os.Geteuid()
}

// noteRightsLocked reads home's rights and reports whether some were taken away since the last call.
func (f *File) noteRightsLocked() (taken bool, err error) {
	now, known, err := f.home.Rights()
	if err != nil || !known {
		return false, err
	}
	if taken = f.rights.Takes(now); taken {
		f.taken++
	}
	f.rights = now
	return taken, nil
}

// RightsTouched is called after a request of the mount changed home's owner, group, mode or ACL. If rights were taken
// away, unmapped memory that users had goes, and released bytes come home, because those users may still be storing
// there. If ctx ends first, that goes on in the background.
func (f *File) RightsTouched(ctx context.Context) {
	done := make(chan struct{})
	f.c.lanes.work.Go(func() {
		defer close(done)
		f.rightsTouched()
	})
	select {
	case <-done:
	case <-ctx.Done():
	}
}

func (f *File) rightsTouched() {
	f.mu.Lock()
	var had []*extent
	if !f.detached.Load() {
		taken, err := f.noteRightsLocked()
		if err != nil {
			f.c.log.Warn("the backing file's permissions could not be read", "file", f.Name(), "error", err)
		}
		if taken {
			f.views.drop() // mapped views stay with their user; nobody else joins them
			had = f.hadByOthersLocked()
			f.dropIdleLocked()
		}
	}
	f.mu.Unlock()
	for _, x := range had {
		if f.evictFor(context.Background(), x, residency.ForOthers) {
			continue
		}
		f.mu.Lock()
		err := f.collectLocked(context.Background(), x.pages(), false)
		f.mu.Unlock()
		if err != nil {
			return // logged, and tried again
		}
	}
}

// hadByOthersLocked returns the extents that were given to users who are not trusted.
func (f *File) hadByOthersLocked() (had []*extent) {
	for h := range f.holdersLocked() {
		for _, x := range h.sorted() {
			for user := range x.given {
				if !f.c.trusts(user) {
					had = append(had, x)
					break
				}
			}
		}
	}
	return had
}

// holdersLocked yields all holdings, each device's first one before any others.
func (f *File) holdersLocked() iter.Seq[*holding] {
	return func(yield func(*holding) bool) {
		for _, d := range f.c.devices {
			if h := f.holdings[d.owner]; h != nil && !yield(h) {
				return
			}
		}
		for _, h := range f.others {
			if !yield(h) {
				return
			}
		}
	}
}

// freeOwnerLocked returns an owner for one more holding of dev.
func (f *File) freeOwnerLocked(dev *device) (versions.Owner, error) {
	if f.holdings[dev.owner] == nil {
		return dev.owner, nil
	}
	for o := ^versions.Owner(0); o > versions.CPU; o-- {
		isDevice := slices.ContainsFunc(f.c.devices, func(d *device) bool { return d.owner == o })
		if f.holdings[o] == nil && !isDevice {
			return o, nil
		}
	}
	return 0, fail(syscall.ENOMEM, "too many users who must not share memory map the file")
}

// choose returns the holding for mapping m. writable says that the client's descriptor is open for writing.
func (f *File) choose(ctx context.Context, m *Mapping, writable bool) (*holding, error) {
	var failed []*holding
	for {
		if err := f.mu.LockIn(ctx); err != nil {
			return nil, err
		}
		if _, err := f.noteRightsLocked(); err != nil {
			f.mu.Unlock()
			return nil, err
		}
		m.intruder = !m.dev.info.ReadOnlyExports && !writable && !f.c.trusts(m.user) && !f.rights.MayStore(m.user)
		h, old, err := f.chooseLocked(m, failed)
		f.mu.Unlock()
		if err != nil || len(old) == 0 {
			return h, err
		}
		for _, x := range old {
			if !f.evictFor(ctx, x, residency.ForOthers) {
				failed = append(failed, h)
				break
			}
		}
	}
}

// chooseLocked returns a holding whose memory m may share, now or once the returned extents are gone. Nobody maps
// these.
func (f *File) chooseLocked(m *Mapping, failed []*holding) (*holding, []*extent, error) {
	var empty, emptied *holding
	var old []*extent
	for h := range f.holdersLocked() {
		if h.dev != m.dev {
			continue
		}
		there, mapped := 0, false
		var not []*extent
		h.each(m.pages, func(x *extent, _ page.Range) {
			if there++; !f.sharesLocked(x, m) {
				not, mapped = append(not, x), mapped || x.Mapped() > 0
			}
		})
		switch {
		case len(not) == 0 && there > 0:
			return h, nil, nil
		case len(not) == 0 && empty == nil:
			empty = h
		case len(not) > 0 && !mapped && emptied == nil && !slices.Contains(failed, h):
			emptied, old = h, not
		}
	}
	switch {
	case empty != nil:
		return empty, nil, nil
	case emptied != nil:
		return emptied, old, nil
	}
	h, err := f.newHoldingLocked(m.dev)
	return h, nil, err
}

// sharesLocked reports whether m may share x with everybody who may have its memory.
func (f *File) sharesLocked(x *extent, m *Mapping) bool {
	may := func() bool {
		for user, g := range x.given {
			switch {
			case user == m.user:
			case m.intruder, g.intruder && !f.c.trustUsers:
				return false
			case !f.c.trusts(user) && (g.taken != f.taken || !f.givenToOthersLocked(x, m)):
				return false
			}
		}
		return true
	}
	if may() {
		return true
	}
	if x.Mapped() > 0 || x.Memory().Held() {
		return false
	}
	x.given = nil // its users gave it back
	return true
}

// givenToOthersLocked reports whether another mapping has x and its client was given the memory. Then x has been mapped
// without a break since the noted users were given it. A mapping that is about to be given the memory does not count.
func (f *File) givenToOthersLocked(x *extent, m *Mapping) bool {
	for o := range f.mappings {
		if o != m && o.h == x.h && o.exported && o.pages.Overlaps(x.pages()) {
			return true
		}
	}
	return false
}

// giveLocked notes that m's client is given the memory. It returns false if others have it who must not share it.
func (f *File) giveLocked(m *Mapping) bool {
	shares := true
	m.h.each(m.pages, func(x *extent, _ page.Range) { shares = shares && f.sharesLocked(x, m) })
	if !shares {
		return false
	}
	m.h.each(m.pages, func(x *extent, _ page.Range) {
		if x.given == nil {
			x.given = make(map[uint32]given)
		}
		x.given[m.user] = given{f.taken, m.intruder}
	})
	return true
}
