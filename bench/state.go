package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// state says where a file's bytes are, besides the disk, when a measurement begins.
type state string

const (
	cold         state = "cold"
	hostWarm     state = "host-warm"
	deviceCached state = "device-cached"
)

// enter brings a file into a state. On a place without devices, device-cached means cold.
func (s *session) enter(ctx context.Context, st state, p *place, d *dataFile) error {
	if st == hostWarm {
		return warm(ctx, p.path(d.name), d.size)
	}
	if s.cold != "" {
		return rows.Impossible{Reason: s.cold}
	}
	if st == deviceCached && p.name == placeGaiafs {
		m, err := d.mapped(p, 0)
		if err != nil {
			return err
		}
		if _, err := m.Acquire(0, m.Len()); err != nil {
			return err
		}
		if share, err := d.onDevice(p, 0); err != nil || share < 1 {
			return fmt.Errorf("only %.0f %% of %s are on the device: %w", 100*share, d.name, err)
		}
	}
	return makeCold(p, d)
}

// warm reads the first n bytes of a file.
func warm(ctx context.Context, path string, n int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for left := n; left > 0 && ctx.Err() == nil; {
		k, err := f.Read(buf[:min(left, int64(len(buf)))])
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		left -= int64(k)
	}
	return ctx.Err()
}

// stillWarm is the share of a file that may stay in host memory when it counts as cold.
const stillWarm = 0.01

// makeCold makes the host forget a file, on the mount and below it. It needs no privileges, but what other programs
// have mapped stays.
func makeCold(p *place, d *dataFile) error {
	paths := []string{p.path(d.name)}
	if p.home() != p.path() {
		paths = append(paths, p.home(d.name))
	}
	for range 3 { // at first the kernel does not drop pages that are on their way to one of its lists
		left := 0.0
		for _, path := range paths {
			if err := dropPages(path); err != nil {
				return err
			}
			share, err := inHostMemory(path, d.size)
			if err != nil {
				return err
			}
			left = max(left, share)
		}
		if left <= stillWarm {
			return nil
		}
	}
	return rows.Impossible{Reason: d.name +
		" cannot be made cold: the host keeps it in memory, perhaps because another program maps it, or because it belongs to another user"}
}

func dropPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// inHostMemory returns the share of a file's first n bytes that is in the kernel's page cache. If the caller may not
// write the file and does not own it, the kernel reports all of it.
func inHostMemory(path string, n int64) (float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	p, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Munmap(p) }()
	held := make([]byte, (n+pageSize-1)/pageSize)
	// The kernel reads neither: p is an address range, and held is written before the call returns.
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
		uintptr(unsafe.Pointer(&held[0])))
	if errno != 0 {
		return 0, errno
	}
	count := 0
	for _, b := range held {
		count += int(b & 1)
	}
	return float64(count) / float64(len(held)), nil
}

// notRoot is why names cannot be made cold.
const notRoot = "only root can make the kernel forget names"

// dropNames makes names and attributes cold, for the whole machine.
func dropNames() error {
	if os.Geteuid() != 0 {
		return rows.Impossible{Reason: notRoot}
	}
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0)
}
