package fs

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// When a file grows directly in SOURCE, the kernel may have the page of the former end, with zeros behind it. Once the
// kernel knows the new size, programs read these zeros, and a store into the page by mmap writes them over the new
// bytes. So before an answer tells the kernel a new size, the kernel drops its pages from the former end on.
//
// Dropping pages makes the kernel ignore attributes that are on their way to it. But the program that asked gets them,
// and may then map the file and touch bytes that do not exist for the kernel. So the daemon also gives the kernel the
// last byte, which makes the kernel's file as long as it should be, and makes it drop that page again: only the size
// must stay.
//
// A kernel that caches writes goes by its own size (docs/write-back.md).

// A request may make the file longer before the kernel was told SOURCE's size: for example, a write past bytes that
// were appended in SOURCE. The kernel adopts the size after that request, and has zeros in the page of the end that it
// knew. So it drops that page before the request is answered. Until then, what it sends of the page is merged against
// the bytes that the page can have been filled with.

// expectSize announces that a request of the mount may make n as long as size. It returns the size that the kernel
// knew.
func (n *node) expectSize(size int64) (told int64) {
	for {
		told = n.told.Load()
		if size <= told || n.told.CompareAndSwap(told, size) {
			return told
		}
	}
}

// unexpectSize undoes expectSize for a request that failed.
func (n *node) unexpectSize(size, told int64) {
	if size > told {
		n.told.CompareAndSwap(size, told)
	}
}

// surpassed returns the kernel's page that has zeros behind told, the end that the kernel knew, if a request makes the
// file longer. size is the file's size before the request. The span is empty if there is no such page.
func (fs *fileSystem) surpassed(n *node, told, size int64) page.Bytes {
	if size <= told || told%page.Size == 0 || fs.writeBack || !n.content().filled.Load() {
		return page.Bytes{}
	}
	return pageSpan(told, 1)
}

// lengthen calls do, which may make n as long as end. do should not wait for the kernel's pages. size is n's size
// before, fd a descriptor of n.
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
		fd = readable // fd itself may be for writing only
	}
	c.gate.Lock()
	c.hazard.suspectPages(again, fd, told)
	err := do()
	if err != nil {
		n.unexpectSize(end, told)
	}
	c.gate.Unlock()
	fs.correct(n, again, readers{})
	return err
}

// tellSize is called before the kernel is told the attributes st of n. If the size is new, it makes the kernel ready
// for it, and fills st again if n is open. It may wait for reads and writes of n.
func (fs *fileSystem) tellSize(n *node, st *unix.Statx_t) {
	if !n.isRegular() || n.told.Load() == int64(st.Size) {
		return
	}
	c := n.data.Load()
	switch {
	case fs.writeBack:
		n.tellLess(c, int64(st.Size)) // the kernel goes by its own size, unless n is new to it
		return
	case c == nil || !c.filled.Load():
		n.told.Store(int64(st.Size)) // the kernel has no page of n
		return
	}
	c.telling.Lock()
	defer c.telling.Unlock()
	told := n.told.Load()
	of := fs.openOf(n, c)
	if of != nil {
		defer of.mu.RUnlock()
		_ = statx(of.fd, "", st) // st is older than told, which may have changed since
	}
	size := int64(st.Size)
	if size > told {
		fs.aside(func() { fs.stretch(n, told, size, of) })
	} else {
		// A push of pages that were cut off would make the kernel's file longer again.
		c.pushing.Lock()
		defer c.pushing.Unlock()
	}
	n.told.CompareAndSwap(told, size)
}

// tellLess is tellSize for a kernel that may ignore the size: told only becomes less, unless n is new to the kernel. c
// is the content of n, or nil.
func (n *node) tellLess(c *content, size int64) {
	if n.told.CompareAndSwap(neverTold, size) {
		return
	}
	if c != nil {
		c.pushing.Lock()
		defer c.pushing.Unlock()
	}
	for told := n.told.Load(); size < told && !n.told.CompareAndSwap(told, size); {
		told = n.told.Load()
	}
}

// openOf returns an open of n, with openFile.mu read-locked, or nil if there is none. If the kernel opens files itself,
// programs may have n open without the daemon's knowledge: then openOf opens it.
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
	if h := n.handle.Load(); fs.unseenOpens && (h == nil || h == noHandle) {
		return nil // a name would be needed, and the caller may have names locked
	}
	used, errno := fs.useKept(context.Background(), keptKey{n: n}, unix.O_NONBLOCK)
	if errno != 0 {
		return nil
	}
	defer used.done()
	if usable(used.openFile) {
		return used.openFile
	}
	return nil
}

// stretch makes the kernel drop its pages of n from the former end on, and adopt the new size. of is an open of n, or
// nil if no program has n mapped.
func (fs *fileSystem) stretch(n *node, told, size int64, of *openFile) {
	fs.changed.Add(1)
	if err := fs.invalidate(n, told, -1); err != nil {
		fs.log.Warn("the kernel's pages of a file that grew in SOURCE could not be dropped", "node", n.path(), "error", err)
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
