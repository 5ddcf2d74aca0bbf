package fs

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// When somebody makes a file longer in SOURCE, the kernel may have the page of the former end, with zeros behind it.
// Once it is told of the new size, programs read these zeros, and a store into the page by mmap writes them over the
// new bytes. So before an answer has a size that the kernel does not know, it drops what it has from the former end on.
//
// Dropping pages makes the kernel ignore the attributes that are on their way to it. The program that asked gets them
// all the same, and may then map the file and touch bytes of which the kernel still believes that there are none. So
// the kernel is given the last byte besides, which makes the file as long as it should be, and drops that again: only
// the size is to stay.
//
// A kernel that caches writes goes by its own size (docs/consistency.md).

// A request may make the file longer before the kernel was told what SOURCE has: a write behind what was added there,
// for one. The kernel goes by the size that such a request leaves, and has zeros in its page of the end that it knew.
// So it drops that page before the request is answered, and until it has, what it sends of the page is compared with
// what it can have been filled with.

// expectSize notes that a request of the mount may make n as long as size, before it does. It returns the size that the
// kernel knew.
func (n *node) expectSize(size int64) (told int64) {
	for {
		told = n.told.Load()
		if size <= told || n.told.CompareAndSwap(told, size) {
			return told
		}
	}
}

// unexpectSize takes expectSize back for a request that failed.
func (n *node) unexpectSize(size, told int64) {
	if size > told {
		n.told.CompareAndSwap(size, told)
	}
}

// surpassed returns the page of the kernel that has zeros behind told, the end that it knew, where the file had size
// before a request that makes it longer. It is empty if there is none.
func (fs *fileSystem) surpassed(n *node, told, size int64) page.Bytes {
	if size <= told || told%page.Size == 0 || fs.writeBack || !n.content().filled.Load() {
		return page.Bytes{}
	}
	return pageSpan(told, 1)
}

// lengthen carries out do, which may make n as long as end, and had better not wait for the kernel's pages. size is
// what n has before, fd a descriptor of it, thread the caller's.
func (fs *fileSystem) lengthen(n *node, fd int, size, end int64, do func() error) error {
	c := n.content()
	told := n.expectSize(end)
	zeros := fs.surpassed(n, told, size)
	if zeros.Empty() {
		c.gate.RLock()
		defer c.gate.RUnlock()
		err := do()
		if err != nil {
			n.unexpectSize(end, told)
		}
		return err
	}
	again := []page.Bytes{zeros}
	if readable, err := fs.openat(unix.AT_FDCWD, procPath(fd), unix.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
		defer unix.Close(readable)
		fd = readable // the one at hand may be for writing only
	}
	c.gate.Lock()
	c.hazard.suspectPages(again, fd, told)
	err := do()
	c.gate.Unlock()
	fs.correct(n, again, readers{})
	return err
}

// tellSize is called before the kernel is told what st says of n, which is brought up to date if need be. It may wait
// for reads and writes of n.
func (fs *fileSystem) tellSize(n *node, st *unix.Statx_t) {
	if !n.isRegular() || n.told.Load() == int64(st.Size) {
		return
	}
	c := n.data.Load()
	if c == nil || fs.writeBack || !c.filled.Load() {
		n.told.Store(int64(st.Size)) // it has no page
		return
	}
	c.telling.Lock()
	defer c.telling.Unlock()
	told := n.told.Load()
	of := fs.openOf(n, c)
	if of != nil {
		defer of.mu.RUnlock()
		_ = statx(of.fd, "", st) // what was known before told may have changed with it
	}
	size := int64(st.Size)
	if size > told {
		fs.aside(func() { fs.stretch(n, told, size, of) })
	}
	n.told.CompareAndSwap(told, size)
}

// openOf returns an open of n, read-locked, or nil if there is none. Where the kernel opens files itself, programs may
// have it open: then it is opened.
func (fs *fileSystem) openOf(n *node, c *content) *openFile {
	usable := func(of *openFile) bool { return of != nil && of.content == c && of.use() }
	if of := c.opened.Load(); usable(of) {
		return of
	}
	for _, of := range fs.files.all() {
		if usable(of) {
			return of
		}
	}
	if !fs.kernelOpens {
		return nil
	}
	used, errno := fs.useKept(context.Background(), n, unix.O_NONBLOCK)
	if errno != 0 {
		return nil
	}
	defer used.done()
	if usable(used.openFile) {
		return used.openFile
	}
	return nil
}

// stretch has the kernel drop what it has of n from its former end on, and makes it take the new one. of is an open of
// n, or nil: then nobody has it mapped.
func (fs *fileSystem) stretch(n *node, told, size int64, of *openFile) {
	fs.changed.Add(1)
	if err := fs.invalidate(n, told, -1); err != nil {
		fs.log.Warn("pages could not be dropped of a file that became longer in SOURCE", "node", n.path(), "error", err)
	}
	if of == nil || of.direct || n.told.Load() != told {
		return
	}
	h := &n.content().hazard
	number := h.invalidationBegins()
	end := pageSpan(size-1, 1)
	defer func() { h.invalidationEnded(number, end) }()
	var last [1]byte
	if m, err := readAt(of.fd, last[:], size-1); err == nil && m == 1 {
		fs.notify.InodeNotifyStoreCache(uint64(n.id), size-1, last[:])
		_ = fs.dropPages(n, end.Off, page.Size)
	}
}
