package residency

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

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

// shortage says why an extent gets no memory. explain makes a sentence of it for the whole request.
type shortage int

const (
	overShare   shortage = iota // the user may not map more
	overMaximum                 // the tenant may not own more
	noRoom                      // no further extent can leave
	usedOutside                 // programs outside of gaiafs use the device's memory
	tooSlow                     // memory that could make room is still in use
)

func (shortage) Error() string { return "there is no memory" }
func (shortage) Unwrap() error { return syscall.ENOMEM }

// full returns the shortage of a device on which nothing can make room.
func (d *Device) full(size int64, owner tenants.ID) error {
	if !d.over(owner, size) && d.backend.Used()+size <= d.Budget() {
		return usedOutside
	}
	return noRoom
}

// explain returns the refusal for a request that failed with err, if that is a shortage. what names the request, which
// needs so many bytes. pins has what it got; they are not freed yet. It says what was asked for, what is free, who has
// the rest, and what helps.
func (d *Device) explain(err error, what string, need int64, by Tenant, pins ...*Pin) error {
	var why shortage
	if !errors.As(err, &why) {
		return err
	}
	budget, used, p := d.Budget(), d.backend.Used(), d.picture(by, pins)
	size := func(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }
	text := fmt.Sprintf("%s needs %s of device %d", what, size(need), d.info.Ordinal)
	switch why {
	case overShare:
		text += fmt.Sprintf(", and user %d may map no more than %s of its %s and maps %s already%s; unmap something, or raise "+
			"user-share with 'gaiafs set'", by.User, size(p.share), size(budget), size(p.user), p.list(p.mine))
	case overMaximum:
		text += fmt.Sprintf(", and %s may own no more than %s (the maximum of tenant %s) and has %s in use%s; unmap "+
			"something, or change the maximum with 'gaiafs set MOUNTPOINT tenants=FILE'", by.id(), size(p.most), by.id(),
			size(p.tenant), p.list(p.own))
	case usedOutside:
		text += fmt.Sprintf(", which has no memory left although only %s of its %s are used here: other programs use the "+
			"GPU's memory; end one of them, or lower gpu-memory with 'gaiafs set'", size(used-p.got), size(budget))
	case tooSlow:
		text += ", and memory that could make room is still being copied from for programs on the CPU: the device is slow, " +
			"or hangs"
	default:
		helps := "unmap something"
		if p.pinned > 0 {
			helps += ", take pins back with 'gaiafs unpin'"
		}
		if p.guaranteed > 0 {
			helps += ", lower the guarantees with 'gaiafs set MOUNTPOINT tenants=FILE'"
		}
		text += fmt.Sprintf(", and only %s of its %s can be had: %s; %s, or raise gpu-memory with 'gaiafs set'",
			size(min(p.had+budget-used-p.unused, need-d.info.Granularity)), size(budget),
			strings.Join(p.everything(), ", "), helps)
	}
	return refuse(syscall.ENOMEM, "%s", text)
}

// picture is who has how much of a device, as someone who asks may see it. Extents that several programs map count for
// each of them.
type picture struct {
	share, user  int64 // bytes that the user may map, and maps
	most, tenant int64 // bytes that the tenant may own, and owns in use
	had, got     int64 // bytes that the request has, and those of them that nobody else maps
	pinned       int64 // bytes of files that are pinned to the device and not mapped
	guaranteed   int64 // bytes that are kept for other tenants, unused of them those without an extent
	unused       int64
	stuck        int64 // bytes of extents that cannot leave although nobody maps them
	kept         int64 // bytes that clients keep that unmapped them
	brackets     []string
	takers       []taker
	// mine are the takers of the user, own those of the tenant.
	mine, own []taker
	hidden    int64 // bytes that programs map that the asker must not see
	pins      string
	name      func(process uint32) string
	asks      uint32 // the user who asks
}

// taker is a program that maps memory.
type taker struct {
	process, user uint32
	bytes         int64
}

// picture looks at every extent. pins are those of the request.
func (d *Device) picture(by Tenant, pins []*Pin) *picture {
	used := d.backend.Used()
	p := &picture{name: d.options.Name, asks: by.User}
	all, mine, own := make(map[taker]int64), make(map[taker]int64), make(map[taker]int64)
	d.mu.Lock()
	defer d.mu.Unlock()
	inBracket := make(map[*Pin]bool)
	for g := range d.grants {
		for _, pin := range g.pins {
			inBracket[pin] = true
		}
	}
	id, stays := by.id(), d.stays()
	p.share, p.most, p.unused = d.shareLocked(), d.ledger.Most(id), d.ledger.Unused(id)
	p.guaranteed, p.kept = p.unused, used-d.taken
	for _, x := range d.extents {
		has := slices.ContainsFunc(pins, func(pin *Pin) bool { return slices.Contains(x.mappers, pin) })
		seen, others, byUser := make(map[taker]bool), 0, false
		for _, pin := range x.mappers {
			if slices.Contains(pins, pin) {
				continue
			}
			others++
			byUser = byUser || pin.by.User == by.User
			t := taker{process: pin.by.Process, user: pin.by.User}
			if seen[t] {
				continue
			}
			seen[t] = true
			if t.user == by.User {
				mine[t] += x.size
			}
			if x.counted == TierVRAM && x.owner == id {
				own[t] += x.size
			}
			if x.counted == TierVRAM && !inBracket[pin] {
				all[t] += x.size
			}
		}
		if byUser {
			p.user += x.size
		}
		if x.counted != TierVRAM {
			continue
		}
		switch {
		case has:
			if p.had += x.size; others == 0 {
				p.got += x.size
			}
		case others > 0:
			if x.owner == id {
				p.tenant += x.size
			}
		case x.mapped > 0: // kept for a moment by the daemon itself
			p.stuck += x.size
		case stays(x):
			p.pinned += x.size
		case x.owner != id && d.ledger.Reserved(x.owner):
			p.guaranteed += x.size
		default:
			p.stuck += x.size
		}
	}
	visible := func(user uint32) bool { return !by.Limited || user == by.User }
	for t, bytes := range all {
		if t.bytes = bytes; visible(t.user) {
			p.takers = append(p.takers, t)
		} else {
			p.hidden += bytes
		}
	}
	for t, bytes := range mine {
		t.bytes = bytes
		p.mine = append(p.mine, t)
	}
	for t, bytes := range own {
		if t.bytes = bytes; visible(t.user) {
			p.own = append(p.own, t)
		}
	}
	p.bracketsLocked(d, visible)
	users, _ := d.pinsLocked().sums()
	users = slices.DeleteFunc(users, func(u UserPins) bool { return !visible(u.User) })
	if p.pins = named(users); p.pins != "" {
		p.pins = " by " + p.pins
	}
	return p
}

// bracketsLocked describes open brackets, the largest first. Device.mu is held.
func (p *picture) bracketsLocked(d *Device, visible func(user uint32) bool) {
	var list []*Grant
	hidden := int64(0)
	for g := range d.grants {
		if len(g.pins) > 0 && !visible(g.pins[0].by.User) {
			hidden += g.bytes
			continue
		}
		list = append(list, g)
	}
	slices.SortFunc(list, func(a, b *Grant) int { return cmp.Compare(b.bytes, a.bytes) })
	for i, g := range list {
		if i == mostNamed {
			p.brackets = append(p.brackets, fmt.Sprintf("and %d more brackets", len(list)-i))
			break
		}
		p.brackets = append(p.brackets, fmt.Sprintf("%s holds %s in a bracket for %v", p.program(g.process),
			humanize.IBytes(uint64(g.bytes)), time.Since(g.since).Round(time.Millisecond)))
	}
	if hidden > 0 {
		p.brackets = append(p.brackets, humanize.IBytes(uint64(hidden))+" are in brackets of other users")
	}
}

// mostNamed is how many programs, and how many brackets, a message names.
const mostNamed = 4

// program names a process.
func (p *picture) program(process uint32) string {
	name := ""
	if p.name != nil && process != 0 {
		name = p.name(process)
	}
	switch {
	case process == 0:
		return "a program"
	case name == "":
		return fmt.Sprintf("process %d", process)
	}
	return fmt.Sprintf("process %d (%s)", process, name)
}

// words says which programs map how much.
func (p *picture) words(takers []taker) (words []string) {
	slices.SortFunc(takers, func(a, b taker) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.process, b.process))
	})
	for i, t := range takers {
		if i == mostNamed {
			words = append(words, fmt.Sprintf("%d more programs map memory", len(takers)-i))
			break
		}
		whose := ""
		if t.user != p.asks {
			whose = fmt.Sprintf(" of user %d", t.user)
		}
		words = append(words, fmt.Sprintf("%s%s maps %s", p.program(t.process), whose, humanize.IBytes(uint64(t.bytes))))
	}
	return words
}

// list says who maps how much, as an addition to a sentence.
func (p *picture) list(takers []taker) string {
	if len(takers) == 0 {
		return ""
	}
	return " (" + strings.Join(p.words(takers), ", ") + ")"
}

// everything says who has the memory of the device.
func (p *picture) everything() (words []string) {
	words = append(slices.Clone(p.brackets), p.words(p.takers)...)
	for _, of := range []struct {
		bytes int64
		text  string
	}{{p.hidden, "are mapped by programs of other users"}, {p.pinned, "are pinned" + p.pins + " and not mapped"},
		{p.guaranteed, "are guaranteed to other tenants"}, {p.kept, "are kept by programs that unmapped them"},
		{p.stuck, "are in use for a moment, or hold bytes that cannot be written back"}} {
		if of.bytes > 0 {
			words = append(words, humanize.IBytes(uint64(of.bytes))+" "+of.text)
		}
	}
	return words
}

// holders says who has what a bracket waits for.
func (d *Device) holders(by Tenant) string {
	words := d.picture(by, nil).everything()
	if files := d.pinned.Limit() - d.pinned.forExtents(); files > 0 {
		words = append(words, fmt.Sprintf("files that are pinned on the host have %s of pinned memory",
			humanize.IBytes(uint64(files))))
	}
	if len(words) == 0 {
		return "no program of this mount has it: programs outside of gaiafs use the memory"
	}
	return strings.Join(words, "; ") + "."
}

// named lists users for a message.
func named(users []UserPins) string {
	names := make([]string, len(users))
	for i, u := range users {
		names[i] = fmt.Sprintf("user %d", u.User)
	}
	return strings.Join(names, ", ")
}
