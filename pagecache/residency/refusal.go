package residency

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/pagecache/residency/shortage"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// refusal says why there is no memory: an errno for programs and a sentence for people.
type refusal struct {
	errno syscall.Errno
	text  string
}

func refuse(errno syscall.Errno, format string, args ...any) error {
	return &refusal{errno, fmt.Sprintf(format, args...)}
}

func (e *refusal) Error() string { return e.text }
func (e *refusal) Unwrap() error { return e.errno }

// full returns the shortage of a device on which nothing can make room.
func (d *Device) full(size int64, owner tenants.ID) error {
	if !d.over(owner, size) && d.backend.Used()+size <= d.Budget() {
		return shortage.UsedOutside
	}
	return shortage.NoRoom
}

// lacking returns err, why there is no room, unless last says that the daemon has no descriptors for more memory. Then
// waiting does not help.
func lacking(d *Device, err, last error) error {
	var why shortage.Kind
	if !errors.Is(err, errFull) && !errors.As(err, &why) ||
		!errors.Is(last, syscall.EMFILE) && !errors.Is(last, syscall.ENFILE) {
		return err
	}
	d.options.Log.Warn("no descriptors are left for memory of the device", "device", d.info.Ordinal, "error", last)
	return refuse(syscall.ENFILE, "the daemon has no descriptors left for memory of device %d (%v); raise its limit of open "+
		"files (ulimit -n, or LimitNOFILE= of the service)", d.info.Ordinal, last)
}

// explain returns the refusal for a request that failed with err, if that is a shortage. what names the request, which
// needs so many bytes. pins has what it got; they are not freed yet.
func (d *Device) explain(err error, what string, need int64, by Tenant, pins ...*Pin) error {
	var why shortage.Kind
	if !errors.As(err, &why) {
		return err
	}
	return refuse(syscall.ENOMEM, "%s", d.picture(by, pins).Text(why, what, need, d.info.Granularity))
}

// picture looks at every extent. pins are those of the request.
func (d *Device) picture(by Tenant, pins []*Pin) *shortage.Picture {
	used := d.backend.Used()
	d.mu.Lock()
	defer d.mu.Unlock()
	id, stays := by.id(), d.stays()
	p := &shortage.Picture{
		Asker: shortage.Asker{User: by.User, Limited: by.Limited, Tenant: string(id), Name: d.options.Name},
		Limits: shortage.Limits{Device: d.info.Ordinal, Budget: d.budget, Used: used, Share: d.shareLocked(),
			Most: d.ledger.Most(id), Unused: d.ledger.Unused(id), Kept: used - d.taken},
	}
	inBracket := make(map[*Pin]bool)
	for g := range d.grants {
		for _, pin := range g.pins {
			inBracket[pin] = true
		}
		if len(g.pins) > 0 {
			p.AddBracket(g.pins[0].program(), g.bytes, time.Since(g.since))
		}
	}
	users, _ := d.pinsLocked().sums()
	for _, u := range users {
		p.PinnedBy = append(p.PinnedBy, u.User)
	}
	for _, x := range d.extents {
		of := shortage.Extent{Size: x.size, Own: x.counted == TierVRAM, OfTenant: x.owner == id, Pinned: stays(x),
			Guaranteed: d.ledger.Reserved(x.owner)}
		for _, pin := range x.mappers {
			if slices.Contains(pins, pin) {
				of.Asked = true
				continue
			}
			of.Mappers = append(of.Mappers, shortage.Mapper{Program: pin.program(), InBracket: inBracket[pin]})
		}
		p.Add(of)
	}
	return p
}

func (p *Pin) program() shortage.Program {
	return shortage.Program{Process: p.by.Process, User: p.by.User}
}

// holders says who has what a bracket waits for.
func (d *Device) holders(by Tenant) string {
	words := d.picture(by, nil).Who()
	if files := d.pinned.Limit() - d.pinned.forExtents(); files > 0 {
		words = append(words, fmt.Sprintf("files that are pinned on the host have %s of pinned memory",
			humanize.IBytes(uint64(files))))
	}
	if len(words) == 0 {
		return "no program of this mount has it: programs outside of gaiafs use the memory"
	}
	return strings.Join(words, "; ") + "."
}
