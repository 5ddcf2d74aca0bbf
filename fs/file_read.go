package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Read implements fuse.RawFileSystem. The bytes are copied: splicing them from the backing file was no quicker at any size
// up to 1 MiB, and at small sizes slower, since it costs two more system calls.
func (fs *fileSystem) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (result fuse.ReadResult, status fuse.Status) {
	of := fs.files.get(in.Fh)
	if of == nil {
		return nil, fuse.EBADF
	}
	off := int64(in.Offset)
	if r := fs.cache.Recording(); r != nil {
		began := time.Now()
		defer func() { of.record(r, in, result, began) }()
	}
	direct := of.direct || in.Flags&unix.O_DIRECT != 0
	if !direct && !of.content.filled.Load() {
		of.content.filled.Store(true)
	}
	if !direct && of.content.hazard.lasts() {
		of.content.gate.RLock()
		defer of.content.gate.RUnlock()
		of.content.hazard.read(off, int64(len(buf)))
	}
	if f := of.content.live(); f != nil {
		n, fromHome, err := f.Read(buf, off, direct)
		if err != nil {
			return nil, toStatus(err)
		}
		if !fromHome {
			return fuse.ReadResultData(buf[:n]), fuse.OK
		}
	}
	n, err := readAt(of.fd, buf, off)
	if err != nil {
		return nil, toStatus(err)
	}
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

// record notes a read that was answered with result, nil if it failed.
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
		Device: pagecache.OnCPU, Thread: in.Pid, Off: int64(in.Offset), Len: int64(result.Size()), Size: -1, Began: began,
	})
}

// readAt reads up to len(p) bytes at off, fewer only at end of file or where an error came after some were read.
func readAt(fd int, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(fd, p[done:], off+int64(done))
		switch {
		case err == unix.EINTR:
		case err != nil && done > 0:
			return done, nil
		case err != nil:
			return 0, err
		case n == 0:
			return done, nil
		default:
			done += n
		}
	}
	return done, nil
}
