package residency

import (
	"fmt"
	"syscall"

	humanize "github.com/dustin/go-humanize"
)

// refusal is why there is no memory: an errno to act on and a sentence to read.
type refusal struct {
	errno syscall.Errno
	text  string
}

func refuse(errno syscall.Errno, format string, args ...any) error {
	return &refusal{errno, fmt.Sprintf(format, args...)}
}

func (e *refusal) Error() string { return e.text }
func (e *refusal) Unwrap() error { return e.errno }

// full is why there is no memory where nothing can make room.
func (d *Device) full(size int64) error {
	if used := d.backend.Used(); used+size <= d.info.Memory {
		return refuse(syscall.ENOMEM,
			"device %d has no memory left although only %s of its %s are used here: other programs use the GPU's memory; end one of them, "+
				"or mount with a smaller --gpu-memory",
			d.info.Ordinal, humanize.IBytes(uint64(used)), humanize.IBytes(uint64(d.info.Memory)))
	}
	return refuse(syscall.ENOMEM,
		"device %d is full: all of its %s are mapped by clients, kept by clients that unmapped it, or hold bytes that cannot be written "+
			"back; unmap something, or mount with a larger --gpu-memory",
		d.info.Ordinal, humanize.IBytes(uint64(d.info.Memory)))
}

// slow is why there is no memory where what could make room is still used.
func (d *Device) slow() error {
	return refuse(syscall.ENOMEM,
		"device %d is full: memory that could make room is still being copied from for programs on the CPU; the device is slow, or hangs",
		d.info.Ordinal)
}
