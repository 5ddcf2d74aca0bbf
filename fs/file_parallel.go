package fs

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/mapped"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// A filesystem carries out write calls of one file under one lock, so they take as long as one core needs to copy. A
// page fault takes no such lock. So several cores store large amounts of bytes into a shared mapping of the file, which
// exists only meanwhile. That needs all pages in the host's page cache: a fault of another page reads it from the disk
// first, and on a full disk it fails where a write call says why.
//
// The kernel notes such stores as it notes write calls: the pages are dirty and the file's mtime moves, before fsync
// returns and while the mapping exists.

var _ pagecache.ParallelWriter = (*home)(nil)

const (
	// parallelChunk is what one core stores at a time, in bytes: the part of the address space that one page of the
	// page table has. Cores whose faults are in the same part wait for each other.
	parallelChunk = 2 << 20
	// faultBytes is how many bytes are faulted in at once, right before they are stored. If the filesystem begins to
	// write a page to the disk in between, the store faults again, and may wait for the disk. Meanwhile Go's garbage
	// collector cannot stop the goroutine, and stops all others. So there must be little time in between.
	faultBytes = 256 << 10
)

// WriteParallel implements pagecache.ParallelWriter.
func (h *home) WriteParallel(runs [][]byte, off int64) bool {
	n := int64(0)
	for _, run := range runs {
		n += int64(len(run))
	}
	if n < 2*parallelChunk || !h.mapsWell() {
		return false
	}
	if cached, err := pagesCached(h.fd, off, n); err != nil || cached < n>>page.Shift {
		return false
	}
	// A write call takes the set-user-ID bit and capabilities off the file, and wakes those who watch SOURCE. Stores
	// into a mapping do not, so the first page gets a call. The rights go before the bytes change.
	if _, err := h.WriteAt(runs[0][:page.Size], off); err != nil {
		return false
	}
	m, err := unix.Mmap(h.fd, off, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return false
	}
	err = h.storeAll(m, runs)
	_ = unix.Munmap(m)
	if err != nil {
		return false
	}
	// Those who were woken may have read already, so the last page gets a call after all stores.
	last := runs[len(runs)-1]
	_, err = h.WriteAt(last[len(last)-page.Size:], off+n-page.Size)
	return err == nil
}

// mapsWell reports whether the filesystem is one whose shared mappings behave like write calls.
func (h *home) mapsWell() bool {
	var in unix.Statfs_t
	if unix.Fstatfs(h.fd, &in) != nil {
		return false
	}
	switch in.Type {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.TMPFS_MAGIC:
		return true
	}
	return false
}

// stores is bytes for adjacent mapped memory.
type stores struct{ to, from []byte }

// partsOf cuts the stores of runs into m at the boundaries of parts of the page table, and returns those of each part.
func partsOf(m []byte, runs [][]byte) (parts [][]stores) {
	part := uintptr(0)
	for _, run := range runs {
		for len(run) > 0 {
			at := uintptr(unsafe.Pointer(unsafe.SliceData(m)))
			n := min(parallelChunk-int(at%parallelChunk), len(run))
			if p := at / parallelChunk; p != part {
				part, parts = p, append(parts, nil)
			}
			last := &parts[len(parts)-1]
			*last = append(*last, stores{m[:n:n], run[:n]})
			m, run = m[n:], run[n:]
		}
	}
	return parts
}

// storeAll stores runs into m one after the other, with several goroutines.
func (h *home) storeAll(m []byte, runs [][]byte) error {
	parts := partsOf(m, runs)
	var next atomic.Int64
	var failed atomic.Bool
	work := func() {
		err := h.fs.spend(h.storer(), func() error {
			for i := next.Add(1) - 1; i < int64(len(parts)) && !failed.Load(); i = next.Add(1) - 1 {
				for _, x := range parts[i] {
					if err := storeInto(x.to, x.from); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			failed.Store(true)
		}
	}
	var group sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(parts)) - 1 {
		group.Go(work)
	}
	work()
	group.Wait()
	if failed.Load() {
		return unix.EFAULT
	}
	return nil
}

// storeInto copies from into to, which is mapped. It fails with EFAULT if the file has become shorter or has no room.
func storeInto(to, from []byte) error {
	for len(to) > 0 {
		n := min(faultBytes, len(to))
		if err := storePart(to[:n], from[:n]); err != nil {
			return err
		}
		to, from = to[n:], from[n:]
	}
	return nil
}

// storePart is storeInto for at most faultBytes.
func storePart(to, from []byte) (err error) {
	err = unix.EINTR
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
		err = unix.Madvise(to, unix.MADV_POPULATE_WRITE) // the faults of all pages at once
	}
	if err != nil {
		return err
	}
	return storeGuarded(to, from)
}

// storeGuarded copies from into to. The kernel may have taken pages back since they were there, and then a fault fails
// with EFAULT if the file was cut meanwhile.
func storeGuarded(to, from []byte) error {
	if !mapped.Try(func() { copy(to, from) }) {
		return unix.EFAULT
	}
	return nil
}
