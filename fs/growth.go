package fs

import (
	"math"

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
	known := fs.knownSize(n, 0, math.MaxInt64)
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
