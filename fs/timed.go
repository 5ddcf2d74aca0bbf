package fs

import (
	"cmp"
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// requestKind is a kind of request of the kernel.
type requestKind uint8

// The kinds that are timed. Locks are missing, because the kernel keeps them itself, and so is FORGET.
const (
	requestLookup requestKind = iota
	requestGetattr
	requestSetattr
	requestCreate
	requestRemove
	requestRename
	requestReadlink
	requestXattr
	requestOpen
	requestRead
	requestWrite
	requestSeek
	requestCopy
	requestIoctl
	requestFlush
	requestFsync
	requestAllocate
	requestClose
	requestReaddir
	requestStatfs
	requestKinds
)

var requestNames = [requestKinds]string{
	"lookup", "getattr", "setattr", "create", "remove", "rename", "readlink", "xattr", "open", "read", "write", "seek",
	"copy", "ioctl", "flush", "fsync", "allocate", "close", "readdir", "statfs",
}

// RequestKinds names all kinds of the kernel's requests.
func RequestKinds() []string { return slices.Clone(requestNames[:]) }

// timed measures the requests that it passes on, from reading the request until its answer is ready.
type timed struct {
	fuse.RawFileSystem
	fs *fileSystem
}

// ended records a request that began at start and has ended, and shows it to live viewers.
func (t timed) ended(kind requestKind, start time.Time, header *fuse.InHeader) {
	t.endedAt(kind, start, header, 0, 0)
}

// endedAt is ended for a request for n bytes at off.
func (t timed) endedAt(kind requestKind, start time.Time, header *fuse.InHeader, off uint64, n uint32) {
	took := time.Since(start)
	t.fs.times[kind].Observe(took)
	if feed := t.fs.cache.Live(); feed.On() {
		fillCaller(&header.Caller)
		t.fs.show(feed, live.Event{At: start, Micros: float64(took) / 1e3, Kind: requestNames[kind],
			Process: header.Caller.Pid,
			User:    header.Caller.Uid, Offset: int64(off), Bytes: int64(n)}, header.NodeId)
	}
}

// show sends an event about a node.
func (fs *fileSystem) show(feed *live.Feed, e live.Event, id uint64) {
	n := fs.node(id)
	if n == nil { // the kernel has forgotten it
		feed.Send(e, nil)
		return
	}
	e.ID = live.FileID(n.key.fileID())
	feed.Send(e, func() []string { return []string{cmp.Or(n.path(), ".")} })
}

// Requests returns the number and the durations of the kernel's requests, by kind. Kinds without requests are left out.
// Reads and writes that pass through, or that the kernel serves from its cache, are not requests.
func (s *Server) Requests() map[string]pagecache.Latency {
	all := make(map[string]pagecache.Latency)
	for i, name := range requestNames {
		if l := s.fs.times[i].Snapshot(); l.Count > 0 {
			all[name] = l
		}
	}
	return all
}

// Lookup implements fuse.RawFileSystem.
func (t timed) Lookup(cancel <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	defer t.ended(requestLookup, time.Now(), header)
	return t.RawFileSystem.Lookup(cancel, header, name, out)
}

// GetAttr implements fuse.RawFileSystem.
func (t timed) GetAttr(cancel <-chan struct{}, input *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	defer t.ended(requestGetattr, time.Now(), &input.InHeader)
	return t.RawFileSystem.GetAttr(cancel, input, out)
}

// SetAttr implements fuse.RawFileSystem.
func (t timed) SetAttr(cancel <-chan struct{}, input *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	defer t.ended(requestSetattr, time.Now(), &input.InHeader)
	return t.RawFileSystem.SetAttr(cancel, input, out)
}

// Mknod implements fuse.RawFileSystem.
func (t timed) Mknod(cancel <-chan struct{}, input *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	defer t.ended(requestCreate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Mknod(cancel, input, name, out)
}

// Mkdir implements fuse.RawFileSystem.
func (t timed) Mkdir(cancel <-chan struct{}, input *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	defer t.ended(requestCreate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Mkdir(cancel, input, name, out)
}

// Unlink implements fuse.RawFileSystem.
func (t timed) Unlink(cancel <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	defer t.ended(requestRemove, time.Now(), header)
	return t.RawFileSystem.Unlink(cancel, header, name)
}

// Rmdir implements fuse.RawFileSystem.
func (t timed) Rmdir(cancel <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	defer t.ended(requestRemove, time.Now(), header)
	return t.RawFileSystem.Rmdir(cancel, header, name)
}

// Rename implements fuse.RawFileSystem.
func (t timed) Rename(cancel <-chan struct{}, input *fuse.RenameIn, oldName string, newName string) fuse.Status {
	defer t.ended(requestRename, time.Now(), &input.InHeader)
	return t.RawFileSystem.Rename(cancel, input, oldName, newName)
}

// Link implements fuse.RawFileSystem.
func (t timed) Link(cancel <-chan struct{}, input *fuse.LinkIn, filename string, out *fuse.EntryOut) fuse.Status {
	defer t.ended(requestCreate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Link(cancel, input, filename, out)
}

// Symlink implements fuse.RawFileSystem.
func (t timed) Symlink(
	cancel <-chan struct{}, header *fuse.InHeader, pointedTo string, linkName string, out *fuse.EntryOut,
) fuse.Status {
	defer t.ended(requestCreate, time.Now(), header)
	return t.RawFileSystem.Symlink(cancel, header, pointedTo, linkName, out)
}

// Readlink implements fuse.RawFileSystem.
func (t timed) Readlink(cancel <-chan struct{}, header *fuse.InHeader) ([]byte, fuse.Status) {
	defer t.ended(requestReadlink, time.Now(), header)
	return t.RawFileSystem.Readlink(cancel, header)
}

// Access implements fuse.RawFileSystem.
func (t timed) Access(cancel <-chan struct{}, input *fuse.AccessIn) fuse.Status {
	defer t.ended(requestGetattr, time.Now(), &input.InHeader)
	return t.RawFileSystem.Access(cancel, input)
}

// GetXAttr implements fuse.RawFileSystem.
func (t timed) GetXAttr(
	cancel <-chan struct{}, header *fuse.InHeader, attr string, dest []byte,
) (uint32, fuse.Status) {
	defer t.ended(requestXattr, time.Now(), header)
	return t.RawFileSystem.GetXAttr(cancel, header, attr, dest)
}

// ListXAttr implements fuse.RawFileSystem.
func (t timed) ListXAttr(cancel <-chan struct{}, header *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	defer t.ended(requestXattr, time.Now(), header)
	return t.RawFileSystem.ListXAttr(cancel, header, dest)
}

// SetXAttr implements fuse.RawFileSystem.
func (t timed) SetXAttr(cancel <-chan struct{}, input *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	defer t.ended(requestXattr, time.Now(), &input.InHeader)
	return t.RawFileSystem.SetXAttr(cancel, input, attr, data)
}

// RemoveXAttr implements fuse.RawFileSystem.
func (t timed) RemoveXAttr(cancel <-chan struct{}, header *fuse.InHeader, attr string) fuse.Status {
	defer t.ended(requestXattr, time.Now(), header)
	return t.RawFileSystem.RemoveXAttr(cancel, header, attr)
}

// Create implements fuse.RawFileSystem.
func (t timed) Create(cancel <-chan struct{}, input *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	defer t.ended(requestCreate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Create(cancel, input, name, out)
}

// Tmpfile implements fuse.RawFileSystem.
func (t timed) Tmpfile(cancel <-chan struct{}, input *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	defer t.ended(requestCreate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Tmpfile(cancel, input, out)
}

// Open implements fuse.RawFileSystem.
func (t timed) Open(cancel <-chan struct{}, input *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	defer t.ended(requestOpen, time.Now(), &input.InHeader)
	return t.RawFileSystem.Open(cancel, input, out)
}

// Read implements fuse.RawFileSystem.
func (t timed) Read(cancel <-chan struct{}, input *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	defer t.endedAt(requestRead, time.Now(), &input.InHeader, input.Offset, input.Size)
	return t.RawFileSystem.Read(cancel, input, buf)
}

// Lseek implements fuse.RawFileSystem.
func (t timed) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	defer t.ended(requestSeek, time.Now(), &in.InHeader)
	return t.RawFileSystem.Lseek(cancel, in, out)
}

// Release implements fuse.RawFileSystem.
func (t timed) Release(cancel <-chan struct{}, input *fuse.ReleaseIn) {
	defer t.ended(requestClose, time.Now(), &input.InHeader)
	t.RawFileSystem.Release(cancel, input)
}

// Write implements fuse.RawFileSystem.
func (t timed) Write(cancel <-chan struct{}, input *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	defer t.endedAt(requestWrite, time.Now(), &input.InHeader, input.Offset, input.Size)
	return t.RawFileSystem.Write(cancel, input, data)
}

// Writev implements fuse.RawFileSystem.
func (t timed) Writev(cancel <-chan struct{}, input *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	defer t.endedAt(requestWrite, time.Now(), &input.InHeader, input.Offset, input.Size)
	return t.RawFileSystem.Writev(cancel, input, data)
}

// CopyFileRange implements fuse.RawFileSystem.
func (t timed) CopyFileRange(cancel <-chan struct{}, input *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	defer t.ended(requestCopy, time.Now(), &input.InHeader)
	return t.RawFileSystem.CopyFileRange(cancel, input)
}

// Ioctl implements fuse.RawFileSystem.
func (t timed) Ioctl(
	cancel <-chan struct{}, input *fuse.IoctlIn, inbuf []byte, output *fuse.IoctlOut, outbuf []byte,
) fuse.Status {
	defer t.ended(requestIoctl, time.Now(), &input.InHeader)
	return t.RawFileSystem.Ioctl(cancel, input, inbuf, output, outbuf)
}

// Flush implements fuse.RawFileSystem.
func (t timed) Flush(cancel <-chan struct{}, input *fuse.FlushIn) fuse.Status {
	defer t.ended(requestFlush, time.Now(), &input.InHeader)
	return t.RawFileSystem.Flush(cancel, input)
}

// Fsync implements fuse.RawFileSystem.
func (t timed) Fsync(cancel <-chan struct{}, input *fuse.FsyncIn) fuse.Status {
	defer t.ended(requestFsync, time.Now(), &input.InHeader)
	return t.RawFileSystem.Fsync(cancel, input)
}

// Fallocate implements fuse.RawFileSystem.
func (t timed) Fallocate(cancel <-chan struct{}, input *fuse.FallocateIn) fuse.Status {
	defer t.ended(requestAllocate, time.Now(), &input.InHeader)
	return t.RawFileSystem.Fallocate(cancel, input)
}

// OpenDir implements fuse.RawFileSystem.
func (t timed) OpenDir(cancel <-chan struct{}, input *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	defer t.ended(requestOpen, time.Now(), &input.InHeader)
	return t.RawFileSystem.OpenDir(cancel, input, out)
}

// ReadDir implements fuse.RawFileSystem.
func (t timed) ReadDir(cancel <-chan struct{}, input *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	defer t.ended(requestReaddir, time.Now(), &input.InHeader)
	return t.RawFileSystem.ReadDir(cancel, input, out)
}

// ReadDirPlus implements fuse.RawFileSystem.
func (t timed) ReadDirPlus(cancel <-chan struct{}, input *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	defer t.ended(requestReaddir, time.Now(), &input.InHeader)
	return t.RawFileSystem.ReadDirPlus(cancel, input, out)
}

// ReleaseDir implements fuse.RawFileSystem.
func (t timed) ReleaseDir(input *fuse.ReleaseIn) {
	defer t.ended(requestClose, time.Now(), &input.InHeader)
	t.RawFileSystem.ReleaseDir(input)
}

// FsyncDir implements fuse.RawFileSystem.
func (t timed) FsyncDir(cancel <-chan struct{}, input *fuse.FsyncIn) fuse.Status {
	defer t.ended(requestFsync, time.Now(), &input.InHeader)
	return t.RawFileSystem.FsyncDir(cancel, input)
}

// StatFs implements fuse.RawFileSystem.
func (t timed) StatFs(cancel <-chan struct{}, input *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	defer t.ended(requestStatfs, time.Now(), input)
	return t.RawFileSystem.StatFs(cancel, input, out)
}

// Statx implements fuse.RawFileSystem.
func (t timed) Statx(cancel <-chan struct{}, input *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	defer t.ended(requestGetattr, time.Now(), &input.InHeader)
	return t.RawFileSystem.Statx(cancel, input, out)
}
