package fs

import (
	"encoding/binary"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// direntBuffer is the buffer size, in bytes, for reading directory entries.
const direntBuffer = 32 << 10

// openDir is an open directory. The kernel sees the backing directory's own offsets. So seekdir works, and the backing
// filesystem decides whether entries made or removed in the meantime are listed.
type openDir struct {
	node   *node
	handle uint64
	fd     int

	mu     sync.Mutex
	buf    []byte // entries as the backing filesystem returned them; protected by mu
	next   int    // the first entry in buf that was not passed on; protected by mu
	filled int    // end of the entries in buf; protected by mu
	offset int64  // of the entry at next; protected by mu
}

// dirent is one entry. Its name is valid until the buffer is filled again.
type dirent struct {
	ino    uint64
	offset int64 // of the entry after it
	kind   uint8
	name   []byte
	size   int
}

// OpenDir implements fuse.RawFileSystem.
func (fs *fileSystem) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.kernelOpens {
		return fuse.ENOSYS // the kernel does not ask again
	}
	n := fs.node(in.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	d, err := fs.openDirectory(n, unix.O_RDONLY|unix.O_DIRECTORY|int(in.Flags&unix.O_NOATIME))
	if err != nil {
		return toStatus(err)
	}
	d.handle = fs.lastHandle.Add(1)
	fs.dirs.put(d.handle, d)
	out.Fh = d.handle
	return fuse.OK
}

// ReleaseDir implements fuse.RawFileSystem.
func (fs *fileSystem) ReleaseDir(in *fuse.ReleaseIn) {
	if d, ok := fs.dirs.take(in.Fh); ok {
		d.close()
	}
}

func (d *openDir) close() { unix.Close(d.fd) }

// FsyncDir implements fuse.RawFileSystem.
func (fs *fileSystem) FsyncDir(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	d, errno := fs.useDir(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer d.done()
	return toStatus(syncDescriptor(d.fd, in.FsyncFlags))
}

// ReadDir implements fuse.RawFileSystem.
func (fs *fileSystem) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	d, errno := fs.useDir(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer d.done()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.each(int64(in.Offset), out, func(e *dirent) bool {
		return out.AddDirEntry(e.toFuse())
	})
}

// ReadDirPlus implements fuse.RawFileSystem. It makes nodes of the entries without opening them.
func (fs *fileSystem) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	d, errno := fs.useDir(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer d.done()
	d.node.names.RLock()
	defer d.node.names.RUnlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.each(int64(in.Offset), out, func(e *dirent) bool {
		entry := e.toFuse()
		reply := out.AddDirLookupEntry(entry)
		if reply == nil {
			return false
		}
		if !entryName(entry.Name) {
			return true // the kernel takes no reference for "." and ".."
		}
		var st unix.Statx_t
		foreign, err := fs.statxIn(d.node, d.fd, entry.Name, &st)
		if err != nil {
			return true // gone by now; without a node the kernel takes it as a mere name
		}
		out.FixMode(uint32(st.Mode))
		n := fs.register(d.node, entry.Name, &st)
		fs.noteHandle(n, d.fd, entry.Name, st.Mnt_id)
		fs.freshen(cancel, &in.Caller, n, &st)
		fs.fillEntry(reply, n, &st)
		if foreign {
			reply.SetAttrTimeout(0)
		}
		return true
	})
}

func (e *dirent) toFuse() fuse.DirEntry {
	return fuse.DirEntry{Ino: e.ino, Mode: uint32(e.kind) << 12, Name: string(e.name), Off: uint64(e.offset)}
}

// each passes the entries from offset on to add, until add returns false or the directory ends. The caller holds d.mu.
// An error after the first entry is left for the next request.
func (d *openDir) each(offset int64, out *fuse.DirEntryList, add func(*dirent) bool) fuse.Status {
	if offset != d.offset || offset == 0 {
		if _, err := unix.Seek(d.fd, offset, unix.SEEK_SET); err != nil {
			return toStatus(err)
		}
		d.next, d.filled, d.offset = 0, 0, offset
	}
	for {
		for d.next < d.filled {
			e := parseDirent(d.buf[d.next:d.filled])
			if !add(&e) {
				return fuse.OK
			}
			d.next += e.size
			d.offset = e.offset
		}
		if d.buf == nil {
			d.buf = make([]byte, direntBuffer)
		}
		n, err := unix.Getdents(d.fd, d.buf)
		if err == syscall.EINTR {
			continue
		}
		d.next, d.filled = 0, max(n, 0)
		if err != nil && len(out.Bytes()) == 0 {
			return toStatus(err)
		}
		if n <= 0 {
			return fuse.OK
		}
	}
}

// parseDirent reads the first struct linux_dirent64 of p (getdents(2)).
func parseDirent(p []byte) dirent {
	e := dirent{
		ino:    binary.NativeEndian.Uint64(p),
		offset: int64(binary.NativeEndian.Uint64(p[8:])),
		size:   int(binary.NativeEndian.Uint16(p[16:])),
		kind:   p[18],
	}
	name := p[19:e.size]
	for i, c := range name {
		if c == 0 {
			name = name[:i]
			break
		}
	}
	e.name = name
	return e
}
