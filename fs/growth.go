package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

var _ pagecache.GrowingPages = kernelPages{}

// beforeWrite is called when the kernel asks for attributes. If the kernel caches writes, a write may follow that makes
// the file longer without another request.
func (fs *fileSystem) beforeWrite(cancel <-chan struct{}, in *fuse.InHeader) {
	if !fs.writeBack {
		return
	}
	n := fs.node(in.NodeId)
	if n == nil || n.data.Load() == nil || !fs.mayBeWritten(n.content()) {
		return
	}
	f := n.content().live()
	if f == nil {
		return
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	known := kernelSize(fs, n)
	var err error
	fs.aside(func() { err = f.BeforeWrite(ctx, known) })
	if err != nil {
		fs.log.Warn("bytes that devices stored past the end of the file may become part of it", "node", n.path(), "error", err)
	}
}

// mayBeWritten reports whether a program may have the file open for writing.
func (fs *fileSystem) mayBeWritten(c *content) bool { return fs.unseenOpens || c.writers.Load() > 0 }

// SendFrom implements pagecache.GrowingPages.
func (k kernelPages) SendFrom(off int64) error {
	n := k.fs.table.byInode(k.key)
	if n == nil || !k.fs.writeBack || !k.fs.mayBeWritten(n.content()) {
		return nil
	}
	return k.fs.invalidate(n, off&^(page.Size-1), -1)
}

// withHole adds to the got bytes at off that a READ of n has the zeros up to the end that the kernel knows, and returns
// how many bytes there are. If the kernel caches writes, a file may be shorter in home. What lies in between is a hole,
// because the kernel sends its pages of a range before it reads there with O_DIRECT. It takes a short answer to a READ
// in the background (io_submit, io_uring) for end of file, and completes others by itself.
func withHole(fs *fileSystem, n *node, buf []byte, got int, off int64) int {
	if got == len(buf) || !fs.writeBack || !fs.mayBeWritten(n.content()) {
		return got
	}
	end := int(min(kernelSize(fs, n)-off, int64(len(buf))))
	if end <= got {
		return got
	}
	clear(buf[got:end])
	return end
}
