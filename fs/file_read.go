package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// Read implements fuse.RawFileSystem. It copies the bytes. Splicing them from the backing file was no faster at any
// size up to 1 MiB, and slower at small sizes, because it takes two more system calls.
func (fs *fileSystem) Read(cancel <-chan struct{}, in *fuse.ReadIn,
	buf []byte) (result fuse.ReadResult, status fuse.Status) {
	used, errno := fs.useFile(&in.InHeader, in.Fh)
	if errno != 0 {
		return nil, fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	of.usedByCPU()
	off := page.Clamp(in.Offset)
	buf = buf[:page.Span(off, int64(len(buf))).Len()]
	if r := fs.cache.Recording(); r != nil {
		began := time.Now()
		defer func() { of.record(r, in, result, began) }()
	}
	direct := passesPages(in)
	if !direct && !of.content.filled.Load() {
		of.content.filled.Store(true)
	}
	if !direct && of.content.hazard.lasts() {
		of.content.gate.RLock()
		defer of.content.gate.RUnlock()
		of.content.hazard.readAgain(off, int64(len(buf)))
		of.content.hazard.read(off, int64(len(buf)), in.Pid)
	}
	if f := of.content.live(); f != nil {
		ctx := newRequest(cancel, &in.Caller)
		defer ctx.end()
		n, fromHome, err := f.Read(ctx, buf, off, direct, of)
		if !fromHome {
			if direct && err == nil {
				n = withHole(fs, of.node, buf, n, off)
			}
			return readResult(buf[:n], err, direct)
		}
		if err != nil {
			return nil, toStatus(err)
		}
	}
	n, err := readAt(of.fd, buf, off)
	if off == 0 && 0 < n && n < aheadLargest {
		fs.ahead.read(of.node)
	}
	if direct && err == nil {
		n = withHole(fs, of.node, buf, n, off)
	}
	return readResult(buf[:n], err, direct)
}

// passesPages reports whether the bytes of a READ go to a program's buffer, not into the kernel's pages. Only in these
// requests does Linux name the owner of the program's locks. The flags of the open do not tell: the kernel also fills
// its pages through opens with O_DIRECT, for mappings.
func passesPages(in *fuse.ReadIn) bool { return in.ReadFlags&fuse.READ_LOCKOWNER != 0 }

// readResult answers a READ that got some bytes and then, perhaps, an error. A direct read returns the bytes, as
// read(2) does. For other reads it returns the error: the kernel would take a short answer for end of file, and fill
// its page with zeros.
func readResult(got []byte, err error, direct bool) (fuse.ReadResult, fuse.Status) {
	if err != nil && (len(got) == 0 || !direct) {
		return nil, toStatus(err)
	}
	return fuse.ReadResultData(got), fuse.OK
}

// ReadAt implements pagecache.HomeReader.
func (of *openFile) ReadAt(p []byte, off int64) (int, error) { return readAt(of.fd, p, off) }

// ReadCached implements pagecache.HomeReader.
func (of *openFile) ReadCached(p []byte, off int64) (int, error) {
	switch cached, known := isCached(of.fd, off, int64(len(p))); {
	case cached:
		return readAt(of.fd, p, off)
	case known:
		return 0, nil
	}
	// This also makes the host read what is not cached.
	n, err := unix.Preadv2(of.fd, [][]byte{p}, off, unix.RWF_NOWAIT)
	if err != nil {
		return 0, nil // not cached, or the filesystem cannot say
	}
	return n, nil
}

// Cached implements pagecache.HomeReader.
func (of *openFile) Cached(off, n int64) bool {
	cached, _ := isCached(of.fd, off, n)
	return cached
}

// Look implements pagecache.HomeReader.
func (of *openFile) Look() (uint64, error) { return of.content.witness.look(of.fd) }

// isCached reports whether the host's page cache has all of the n bytes at off, which lie inside the file. known is
// false on Linux before 6.5, and if the daemon may not ask (cachestat(2)).
func isCached(fd int, off, n int64) (cached, known bool) {
	pages := page.Covering(off, n)
	found, err := pagesCached(fd, pages.Offset(), pages.Bytes())
	return err == nil && found >= pages.Len(), err == nil
}

// pagesCached returns how many pages of the n bytes at off are in the host's page cache. It fails on Linux before 6.5,
// and if the daemon may not ask (cachestat(2)).
func pagesCached(fd int, off, n int64) (int64, error) {
	var found unix.Cachestat_t
	err := unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &found, 0)
	return int64(found.Cache), err
}

// record records a read that was answered with result, which is nil if the read failed.
func (of *openFile) record(r *pagecache.Recording, in *fuse.ReadIn, result fuse.ReadResult, began time.Time) {
	if result == nil {
		return
	}
	r.Access(pagecache.Access{
		File: of.ID(),
		Describe: func() (string, int64) {
			var st unix.Stat_t
			_ = unix.Fstat(of.fd, &st)
			return of.Name(), st.Size
		},
		Device: pagecache.OnCPU, Thread: in.Pid, Off: int64(in.Offset), Len: int64(result.Size()), Size: -1,
		Began: began,
	})
}

// readAt reads up to len(p) bytes at off, fewer at end of file. With an error, it returns how many bytes came before
// it.
func readAt(fd int, p []byte, off int64) (int, error) {
	// The last page of the largest file is one byte short, and the kernel refuses to read that byte.
	p = p[:page.Span(off, int64(len(p))).Len()]
	done := 0
	for done < len(p) {
		n, err := unix.Pread(fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return done, err
		case n == 0:
			return done, nil
		default:
			done += n
		}
	}
	return done, nil
}
