package pagecache

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Pinning says where a file stays until it is unpinned, and who is charged: its extents on devices, its pages in the
// host's page cache. The zero value pins nothing.
type Pinning struct {
	// Host locks the file's pages in the host's page cache, from where devices copy fastest (locked.go).
	Host bool
	// All pins on every device; otherwise Devices has the devices' numbers, in order.
	All     bool
	Devices []int
	// User is the file's owner. The pin covers no more than the user may map (Options.UserShare).
	User uint32
}

// mostPinnedText bounds the text of a Pinning.
const mostPinnedText = 1 << 10

// ParsePinning reads the text of a Pinning without its user: "none", or a list of "host", "all" and device numbers that
// is separated by commas. EINVAL for anything else.
func ParsePinning(text string) (p Pinning, err error) {
	switch {
	case text == "none":
		return Pinning{}, nil
	case len(text) > mostPinnedText:
		return p, fail(syscall.EINVAL, "a pin has at most %d characters", mostPinnedText)
	}
	for word := range strings.SplitSeq(text, ",") {
		switch word {
		case "host":
			p.Host = true
			continue
		case "all":
			p.All = true
			continue
		}
		n, err := strconv.ParseUint(word, 10, 8)
		if err != nil {
			return Pinning{}, fail(syscall.EINVAL, "%q is not none, or a list of host, all and device numbers", text)
		}
		p.Devices = append(p.Devices, int(n))
	}
	if p.All {
		p.Devices = nil
	}
	slices.Sort(p.Devices)
	p.Devices = slices.Compact(p.Devices)
	return p, nil
}

// String returns the text that ParsePinning reads.
func (p Pinning) String() string {
	if !p.Any() {
		return "none"
	}
	var words []string
	if p.Host {
		words = append(words, "host")
	}
	if p.All {
		words = append(words, "all")
	}
	for _, d := range p.Devices {
		words = append(words, strconv.Itoa(d))
	}
	return strings.Join(words, ",")
}

// On reports whether the file is pinned on a device.
func (p Pinning) On(device int) bool { return p.All || slices.Contains(p.Devices, device) }

// OnDevices reports whether the file is pinned on any device.
func (p Pinning) OnDevices() bool { return p.All || len(p.Devices) > 0 }

// Any reports whether the file is pinned anywhere.
func (p Pinning) Any() bool { return p.Host || p.OnDevices() }

// tenant returns who is charged.
func (p Pinning) tenant(c *Cache) residency.Tenant {
	return residency.Tenant{User: p.User, Limited: !c.trusts(p.User)}
}

// SetPinning replaces the file's pin. It does not block. An eviction that has begun may still take an extent. If the
// file is pinned on the host, the background locks its pages soon.
func (f *File) SetPinning(p Pinning) {
	old := f.pinning.Swap(&p)
	f.locking.gaveUp.Store(false)
	if p.Host != (old != nil && old.Host) {
		f.c.pinned.PinsChanged()
	}
	if p.Host || old == nil || !old.Host {
		return
	}
	f.locking.failed.Store(nil)
	f.c.lanes.do(f, choreUnlock, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.coolLocked()
		f.dropIdleLocked()
	})
}

// Pinning returns the file's pin, as set last.
func (f *File) Pinning() Pinning {
	if p := f.pinning.Load(); p != nil {
		return *p
	}
	return Pinning{}
}

// pinnedOn reports whether the file is pinned on a device, and who is charged. It takes no lock.
func (f *File) pinnedOn(d *device) (by residency.Tenant, pinned bool) {
	p := f.pinning.Load()
	if p == nil || !p.On(d.info.Ordinal) {
		return by, false
	}
	return p.tenant(f.c), true
}

// Pinned implements residency.Key.
func (h *holding) Pinned() (by residency.Tenant, pinned bool) { return h.f.pinnedOn(h.dev) }

// Repin asks find for the pin of each File and sets it, if known. It blocks on find.
func (c *Cache) Repin(find func(FileID) (p Pinning, known bool)) {
	for _, f := range c.snapshotFiles() {
		if p, known := find(f.id); known {
			f.SetPinning(p)
		}
	}
}

// CheckPinning returns an error if a file of so many bytes can never be pinned this way, given what the user has pinned
// and maps: ENODEV for a device that the mount does not have, ENOSPC for more than a device's budget or the pinned
// memory, EDQUOT for more than the user's share of either. It does not block.
func (c *Cache) CheckPinning(id FileID, size int64, p Pinning) error {
	for _, n := range p.Devices {
		if !slices.ContainsFunc(c.devices, func(d *device) bool { return d.info.Ordinal == n }) {
			return fail(syscall.ENODEV, "the mount has no device %d", n)
		}
	}
	f, by := c.Lookup(id), p.tenant(c)
	if p.Host {
		if err := c.pinned.CheckFile(f, by, countsFor(size)); err != nil {
			return fmt.Errorf("pinning: %w", err)
		}
	}
	for _, d := range c.devices {
		if !p.On(d.info.Ordinal) {
			continue
		}
		need := (size + d.info.Granularity - 1) / d.info.Granularity * d.info.Granularity
		if f != nil {
			if now, is := f.pinnedOn(d); is && now == by {
				continue // counted already
			}
		}
		if err := d.room.CheckPinned(by, need); err != nil {
			return fmt.Errorf("pinning: %w", err)
		}
	}
	return nil
}
