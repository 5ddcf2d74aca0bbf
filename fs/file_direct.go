package fs

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// directFilesystems are the filesystems on which O_DIRECT reads are known, by tests, to see buffered writes: they first
// write the dirty pages of the range to the disk. There, cachestat on the file's descriptor also finds its pages in the
// kernel's page cache. That is not so if another filesystem lies below (overlay, FUSE).
var directFilesystems = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4",
	unix.XFS_SUPER_MAGIC:  "xfs",
}

// direct reads a home past the host's page cache.
type direct struct {
	once sync.Once
	fd   int // opened with O_DIRECT; meaningless if err is set
	err  error
}

// open opens the backing file a second time, with O_DIRECT if that is possible. h.fd is not changed: O_DIRECT is a flag
// of the open file.
func (d *direct) open(h *home) error {
	d.once.Do(func() {
		if d.err = directPossible(h.fd); d.err != nil {
			return
		}
		var err error
		d.fd, err = h.fs.openat(unix.AT_FDCWD, procPath(h.fd), unix.O_RDONLY|unix.O_DIRECT|unix.O_LARGEFILE, 0)
		switch {
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			d.err = &pagecache.NoDirect{Reason: "there are no more file descriptors"}
		case err != nil:
			d.err = &pagecache.NoDirect{Reason: fmt.Sprintf("opening files with O_DIRECT: %v", err)}
		}
	})
	return d.err
}

// close prevents use of the second descriptor. No call may be using it.
func (d *direct) close() {
	d.once.Do(func() { d.err = unix.EBADF })
	if d.err == nil {
		_ = unix.Close(d.fd)
	}
}

// directPossible returns nil if a file can be read past the host's page cache, else the reason.
func directPossible(fd int) error {
	var in unix.Statfs_t
	if err := unix.Fstatfs(fd, &in); err != nil {
		return err
	}
	name, ok := directFilesystems[int64(in.Type)]
	if !ok {
		return &pagecache.NoDirect{Reason: fmt.Sprintf("SOURCE is on a filesystem (type %#x) other than ext4 and xfs",
			in.Type)}
	}
	// If the kernel does not report the alignment that it needs, a page suits every disk. If not, the read fails with
	// EINVAL.
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		switch {
		case st.Dio_offset_align == 0:
			return &pagecache.NoDirect{Reason: "this " + name +
				" does not take O_DIRECT for files of this kind (encrypted, journaled, or kept in the inode)"}
		case page.Size%st.Dio_offset_align != 0 || page.Size%st.Dio_mem_align != 0:
			return &pagecache.NoDirect{Reason: fmt.Sprintf("O_DIRECT needs multiples of %d bytes",
				max(st.Dio_offset_align, st.Dio_mem_align))}
		}
	}
	return nil
}

// Cached implements pagecache.DirectReader.
func (h *home) Cached(off, n int64) (int64, error) {
	if err := h.direct.open(h); err != nil {
		return 0, err
	}
	pages, err := pagesCached(h.fd, off, n)
	if err != nil {
		return 0, &pagecache.NoDirect{Reason: fmt.Sprintf("the host's page cache cannot be queried (cachestat of Linux 6.5): %v", err)}
	}
	return pages << page.Shift, nil
}

// ReadDirect implements pagecache.DirectReader.
func (h *home) ReadDirect(p []byte, off int64) (int, error) {
	if err := h.direct.open(h); err != nil {
		return 0, err
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(p)))%page.Size != 0 {
		return 0, unix.EINVAL // a fault of the caller's buffer, not of the file
	}
	done := 0
	for done < len(p) {
		n, err := unix.Pread(h.direct.fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
		case err == unix.EINVAL, err == unix.EOPNOTSUPP:
			return done, &pagecache.NoDirect{Reason: fmt.Sprintf("reading with O_DIRECT: %v", err)}
		case err != nil:
			return done, err
		case n == 0:
			return done, nil
		default:
			// A partial page: either this is the end of the file, or the next offset is one that O_DIRECT does not
			// accept.
			if done += n; n%page.Size != 0 {
				n, err := h.ReadAt(p[done:], off+int64(done))
				return done + n, err
			}
		}
	}
	return done, nil
}

// Drop implements pagecache.DirectReader.
func (h *home) Drop(off, n int64) { _ = unix.Fadvise(h.fd, off, n, unix.FADV_DONTNEED) }
