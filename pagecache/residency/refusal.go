package residency

import (
	"fmt"
	"strings"
	"syscall"

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

// full returns the refusal for a device that nothing can make room on.
func (d *Device) full(size int64) error {
	budget := d.Budget()
	if used := d.backend.Used(); used+size <= budget {
		return refuse(syscall.ENOMEM,
			"device %d has no memory left although only %s of its %s are used here: other programs use the GPU's memory; end one of them, "+
				"or lower gpu-memory with 'gaiafs set'",
			d.info.Ordinal, humanize.IBytes(uint64(used)), humanize.IBytes(uint64(budget)))
	}
	d.mu.Lock()
	users, idle := d.pinsLocked().sums()
	d.mu.Unlock()
	if idle > 0 {
		return refuse(syscall.ENOMEM,
			"device %d is full: of its %s, %s are pinned by %s and not mapped, and the rest is mapped by clients, kept by clients that "+
				"unmapped it, or holds bytes that cannot be written back; 'gaiafs unpin' takes pins back, or raise gpu-memory with 'gaiafs set'",
			d.info.Ordinal, humanize.IBytes(uint64(budget)), humanize.IBytes(uint64(idle)), named(users))
	}
	return refuse(syscall.ENOMEM,
		"device %d is full: all of its %s are mapped by clients, kept by clients that unmapped it, or hold bytes that cannot be written "+
			"back; unmap something, or raise gpu-memory with 'gaiafs set'",
		d.info.Ordinal, humanize.IBytes(uint64(budget)))
}

// most returns the refusal for a tenant that has reached its maximum.
func (d *Device) most(id tenants.ID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return refuse(syscall.ENOMEM, "device %d: %s may own no more than %s (the maximum of tenant %s), too little for this and what "+
		"programs map already; unmap something, or change the maximum with 'gaiafs set MOUNTPOINT tenants=FILE'",
		d.info.Ordinal, id, humanize.IBytes(uint64(d.ledger.Most(id))), id)
}

// slow returns the refusal for a device on which memory that could make room is still in use.
func (d *Device) slow() error {
	return refuse(syscall.ENOMEM,
		"device %d is full: memory that could make room is still being copied from for programs on the CPU; the device is slow, or hangs",
		d.info.Ordinal)
}

// named lists users for a message.
func named(users []UserPins) string {
	names := make([]string, len(users))
	for i, u := range users {
		names[i] = fmt.Sprintf("user %d", u.User)
	}
	return strings.Join(names, ", ")
}
