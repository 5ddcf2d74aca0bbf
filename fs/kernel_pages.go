package fs

import (
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// The kernel's page cache of a file is the CPU's replica. Dropping pages from it during a program's write has a race,
// after which readers get old bytes for good:
//
//	write()        copies the new bytes into a page, unlocks the page, sends WRITE and waits
//	invalidation   drops that page: it is neither dirty nor locked
//	read()         finds no page, sends READ
//	daemon         answers READ from home, before it carries out WRITE
//
// The page that READ filled stays. Its bytes are older than those of the write() that has returned.
//
// The cure rests on one fact: the kernel holds the inode's lock from the copy into the page until WRITE is answered. So
// at most one such WRITE of an inode is in flight.
//
// A hazard begins when an invalidation starts. While it lasts, the daemon remembers the ranges of READs that may fill
// the page cache, each before it reads home. A WRITE that completes during the invalidation may have been in flight
// when its page was dropped. Of the WRITEs that complete later, only the first may have been, and it ends the hazard.
//
// If the bytes of such a WRITE overlap a remembered READ, the kernel drops these pages once more before WRITE is
// answered. So a program that waited for write() never sees the old page. If READ got old bytes, it was remembered
// before WRITE changed home, because a READ is remembered before it reads home. The second invalidation waits for a
// READ that is still under way, because the kernel keeps its page locked. It needs no hazard of its own: its WRITE is
// home already, and no other WRITE can have begun.
//
// Between the stale fill and the second invalidation, a program that maps the page may store into it. Then the whole
// page goes home, with the bytes that WRITE had replaced. So while a hazard lasts, reads and writes exclude each other.
// Before a WRITE that overlaps a remembered READ changes home, the daemon keeps home's pages: the stale pages were
// filled with them. What the kernel writes back of such a page is merged by bytes against the kept page, until the
// second invalidation is done or the kernel asks for the page again. A kernel that asks for a page no longer has it,
// and now gets WRITE's bytes. From then on, even a store of the byte that WRITE replaced counts as a store.
//
// WRITEs of mapped pages do not count: such a page is dirty or under write-back until it is home, and an invalidation
// waits for that. O_DIRECT writes do not end a hazard, because several may be in flight.
//
// In one rare case, WRITE itself has the page locked that must be dropped: a partial write to a page that was not up to
// date. Waiting would never end. So WRITE is answered after a short wait. The invalidation finishes later, and is a
// hazard of its own from then on.

// A WRITE waits some rounds for pages to be dropped again. An invalidation takes a few microseconds, unless it waits
// for the lock of a page. Either of two threads can hold that lock: a reader whose READ was answered but who has not
// run since, or the WRITE's own thread, for which waiting is useless. If WRITE gives up on a reader, its own program
// can read the bytes that it has just replaced. So WRITE waits a few rounds, and continues while a reader of its pages
// may not have run (readers.go).
//
// A round is not a fixed time. It is one short sleep of this process, and takes longer when processors are busy.
const (
	correctionPatience     = 5
	mostCorrectionPatience = 5000
	patienceRound          = time.Millisecond
)

// maxRemembered is how many ranges are remembered. With more, everything counts as read.
const maxRemembered = 64

// remembered is a range that was read.
type remembered struct {
	page.Bytes
	// invalidation is the number of the last invalidation that had begun by then.
	invalidation uint64
}

// hazard remembers the reads since an invalidation began. The zero hazard is not in force.
//
// If a read was remembered before a later invalidation began, that invalidation drops the pages that the read brought
// in: by then the kernel had them, locked or filled. So the end of an invalidation forgets such reads in its range.
// This makes the rare case above, in which a WRITE waits for nothing, rarer.
type hazard struct {
	// on is set while reads must be remembered. It keeps locks off the common path. It is set before the invalidation
	// is sent, so every read after a page was dropped sees it.
	on atomic.Bool

	mu         sync.Mutex
	running    int          // invalidations under way; protected by mu
	begun      uint64       // invalidations begun; protected by mu
	reads      []remembered // protected by mu
	everything bool         // reads is incomplete, so everything counts as read; protected by mu
	// reading is the last range that each thread read, unless the thread has written since. Protected by mu.
	reading map[uint32]page.Bytes

	// suspects are pages that the kernel may hold without the bytes of a WRITE, each with the bytes on which kernel and
	// home last agreed. Protected by content.gate; changed only while that is locked. doubts counts the corrections
	// under way.
	suspects map[page.Index]*suspect
	doubts   atomic.Int32
}

// suspect is a page that the kernel may have filled too early.
type suspect struct {
	base  [page.Size]byte
	users int // corrections that will drop it
	// unread says that home did not give the page. The kernel has not got it either, so it is no suspect.
	unread bool
	// fresh says that the kernel asked for the page again, which is no suspect then. Set with the gate read-locked.
	fresh atomic.Bool
}

// lasts reports whether reads and writes must exclude each other.
func (h *hazard) lasts() bool { return h.on.Load() || h.doubts.Load() > 0 }

// invalidationBegins must be called before the kernel is told to drop pages. It returns the invalidation's number.
func (h *hazard) invalidationBegins() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running++
	h.begun++
	h.on.Store(true)
	return h.begun
}

// invalidationEnded must be called after the kernel answered, with the range that it dropped.
func (h *hazard) invalidationEnded(number uint64, dropped page.Bytes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running--
	h.reads = slices.DeleteFunc(h.reads, func(r remembered) bool {
		return r.invalidation < number && dropped.Off <= r.Off && r.End <= dropped.End
	})
}

// readAgain marks suspect pages in the n bytes at off as fresh: the kernel asks for them, and gets home's current
// bytes. The caller holds the gate read-locked.
func (h *hazard) readAgain(off, n int64) {
	if h.doubts.Load() == 0 {
		return
	}
	rg := pageSpan(off, n).Pages()
	for i := rg.Start; i < rg.End; i++ {
		if x := h.suspects[i]; x != nil {
			x.fresh.Store(true)
		}
	}
}

// read remembers that a thread's READ of n bytes at off may fill the kernel's pages. It must be called before home is
// read.
func (h *hazard) read(off, n int64, thread uint32) {
	if !h.on.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.on.Load() || h.everything {
		return
	}
	s := pageSpan(off, n)
	h.noteReader(thread, s)
	for i := range h.reads {
		r := &h.reads[i]
		if r.invalidation == h.begun && r.Off <= s.End && s.Off <= r.End {
			r.Off, r.End = min(r.Off, s.Off), max(r.End, s.End)
			return
		}
	}
	if len(h.reads) == maxRemembered {
		h.reads, h.reading, h.everything = nil, nil, true
		return
	}
	h.reads = append(h.reads, remembered{s, h.begun})
}

// noteReader remembers what a thread reads. Beyond maxRemembered threads, all count as one unknown thread.
func (h *hazard) noteReader(thread uint32, s page.Bytes) {
	if h.reading == nil {
		h.reading = make(map[uint32]page.Bytes)
	}
	if _, known := h.reading[thread]; !known && len(h.reading) >= maxRemembered {
		for _, other := range h.reading {
			s = page.Bytes{Off: min(s.Off, other.Off), End: max(s.End, other.End)}
		}
		clear(h.reading)
		thread = unknownThread
	}
	if before, known := h.reading[thread]; known && thread == unknownThread {
		s = page.Bytes{Off: min(s.Off, before.Off), End: max(s.End, before.End)}
	}
	h.reading[thread] = s
}

// overlap returns the ranges to drop again after a thread's WRITE of n bytes at off, and the other threads that may be
// reading them.
func (h *hazard) overlap(off, n int64, thread uint32) (again []page.Bytes, by readers) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.on.Load() {
		return nil, by
	}
	w := pageSpan(off, n)
	if thread != unknownThread {
		delete(h.reading, thread) // it has returned from its READs
	}
	by.waiting = make(map[uint32]int64)
	if h.everything {
		again, by.waiting[unknownThread] = []page.Bytes{w}, -1
	}
	for other, r := range h.reading {
		if !r.Intersect(w).Empty() {
			by.waiting[other] = -1
		}
	}
	for _, r := range h.reads {
		if o := r.Intersect(w); !o.Empty() {
			again = append(again, o)
		}
	}
	return again, by
}

// written must be called after a WRITE of a kind of which only one can be in flight. It ends the hazard, unless an
// invalidation is still running.
func (h *hazard) written() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running == 0 {
		h.on.Store(false)
		h.reads, h.reading, h.everything = nil, nil, false
	}
}

// suspectPages keeps home's bytes of the pages of spans before a WRITE changes home. The kernel may hold these pages
// without that WRITE. In the page of offset end, it may have zeros from end on. The caller holds the gate locked.
func (h *hazard) suspectPages(spans []page.Bytes, fd int, end int64) {
	if len(spans) == 0 {
		return
	}
	h.doubts.Add(1)
	for _, s := range spans {
		for i := s.Pages().Start; i < s.Pages().End; i++ {
			x := h.suspects[i]
			if x == nil || x.unread || x.fresh.Load() {
				again := new(suspect)
				again.unread = readPage(fd, i, &again.base) != nil
				if x != nil {
					again.users = x.users
				}
				if h.suspects == nil {
					h.suspects = make(map[page.Index]*suspect)
				}
				x, h.suspects[i] = again, again
			}
			x.users++
			if i == page.Index(end>>page.Shift) {
				clear(x.base[end-i.Offset():])
			}
		}
	}
}

// readPage reads a page of the file that fd is open on. fd may be open for writing only, or with O_PATH.
func readPage(fd int, i page.Index, p *[page.Size]byte) error {
	_, err := readAt(fd, p[:], i.Offset())
	if err != unix.EBADF {
		return err
	}
	if fd, err = unix.Open(procPath(fd), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = readAt(fd, p[:], i.Offset())
	return err
}

// trustPages undoes suspectPages after the kernel dropped the pages. The caller holds the gate locked.
func (h *hazard) trustPages(spans []page.Bytes) {
	for _, s := range spans {
		for i := s.Pages().Start; i < s.Pages().End; i++ {
			if known := h.suspects[i]; known != nil {
				if known.users--; known.users == 0 {
					delete(h.suspects, i)
				}
			}
		}
	}
	h.doubts.Add(-1)
}

// mergeSuspects returns the bytes to write home for data, which the kernel writes back at off. Of a suspect page, these
// are only the bytes that a program changed; the others are home's. The caller holds the gate locked.
func (h *hazard) mergeSuspects(data []byte, off int64, fd int) ([]byte, error) {
	merged, sent := data, page.Span(off, int64(len(data)))
	for i := sent.Pages().Start; i < sent.Pages().End; i++ {
		known := h.suspects[i]
		if known == nil || known.unread || known.fresh.Load() {
			continue
		}
		if &merged[0] == &data[0] {
			merged = slices.Clone(data) // the request's buffer must not be changed
		}
		var home [page.Size]byte
		if err := readPage(fd, i, &home); err != nil {
			return nil, err
		}
		part := sent.Intersect(page.Range{Start: i, End: i + 1}.Span())
		for at := part.Off; at < part.End; at++ {
			b := &known.base[at-i.Offset()]
			if mine := data[at-off]; mine == *b {
				merged[at-off] = home[at-i.Offset()]
			} else {
				*b = mine
			}
		}
	}
	return merged, nil
}

// pageSpan returns the span of the pages that contain the n bytes at off.
func pageSpan(off, n int64) page.Bytes { return page.Covering(off, n).Span() }

// kernelPages implements pagecache.KernelPages for the node that has the inode at the time of the call: the kernel may
// forget a file and look it up again while a device still holds it.
type kernelPages struct {
	fs  *fileSystem
	key inodeKey
}

// Invalidate implements pagecache.KernelPages.
func (k kernelPages) Invalidate(off, n int64) error {
	if n == 0 {
		return nil
	}
	node := k.fs.table.byInode(k.key)
	if node == nil {
		return nil // the kernel does not know the inode, so it has no page of it
	}
	return k.fs.invalidate(node, off, n)
}

// Push implements pagecache.KernelPages.
//
// The kernel locks the pages of a READ until it is answered, so whoever makes it drop pages waits for the READs before.
// It locks those of a push only when the daemon sends them. So what makes pages old, or makes the kernel drop them,
// waits for pushes itself (content.awaitPushes): an invalidation, an open for writing, a change of the size. So does
// whoever tells the kernel that the file became shorter (tellSize).
func (k kernelPages) Push(off int64, p []byte, current func() bool) bool {
	n := k.fs.table.byInode(k.key)
	if n == nil {
		return false
	}
	c := n.content()
	if !c.pushing.TryRLock() {
		return false
	}
	defer c.pushing.RUnlock()
	if k.fs.mayBeWritten(c) || off+int64(len(p)) > n.told.Load() || !current() {
		return false
	}
	return k.fs.notify.InodeNotifyStoreCache(uint64(n.id), off, p) == fuse.OK
}

// awaitPushes waits for the pushes that have begun. It waits for the kernel as invalidate does.
func (c *content) awaitPushes() {
	c.pushing.Lock()
	//lint:ignore SA2001 nothing is guarded; the point is to have waited
	c.pushing.Unlock()
}

// invalidate makes the kernel drop its pages of the n bytes at off, or to the end of the file if n is negative, and its
// attributes. The caller must hold no lock that a request needs.
func (fs *fileSystem) invalidate(node *node, off, n int64) error {
	h := &node.content().hazard
	dropped := page.From(off).Pages().Span()
	if off >= 0 && n > 0 {
		dropped = pageSpan(off, n)
	}
	number := h.invalidationBegins()
	defer func() { h.invalidationEnded(number, dropped) }()
	// Requests that did not see the hazard are over when the gate was ours.
	node.content().gate.Lock()
	//lint:ignore SA2001 nothing is guarded; the point is to have waited
	node.content().gate.Unlock()
	return fs.dropPages(node, off, n)
}

// dropPages is invalidate without a hazard.
func (fs *fileSystem) dropPages(node *node, off, n int64) error {
	node.content().awaitPushes()
	switch status := fs.notify.InodeNotify(uint64(node.id), off, n); status {
	case fuse.OK, fuse.ENOENT: // ENOENT: the kernel has forgotten the inode
		return nil
	case fuse.Status(syscall.EBADF), fuse.ENODEV, fuse.Status(syscall.ENOTCONN):
		return nil // unmounted, so there are no pages
	default:
		return syscall.Errno(status)
	}
}

// correct makes the kernel drop suspect pages again. It is called after a WRITE changed home and before it is answered.
// The caller holds no lock.
func (fs *fileSystem) correct(n *node, again []page.Bytes, by readers) {
	if len(again) == 0 {
		return
	}
	fs.corrections.Add(1)
	c := n.content()
	ended := fs.apart(func() {
		for _, s := range again {
			if err := fs.dropPages(n, s.Off, s.Len()); err != nil {
				fs.log.Warn("pages that were read during a write could not be dropped", "node", n.path(), "error", err)
			}
		}
		c.gate.Lock()
		defer c.gate.Unlock()
		c.hazard.trustPages(again)
	})
	if fs.await(ended, by.haveRun) {
		return
	}
	// From now on this is an ordinary invalidation: the next WRITE may be in flight when its page is dropped. It
	// forgets no reads, because they may be younger than what it drops.
	late := c.hazard.invalidationBegins()
	fs.background.Go(func() {
		<-ended
		c.hazard.invalidationEnded(late, page.Bytes{})
	})
}

// aside runs call in a new goroutine and waits for it. The goroutine that serves a request must not itself tell the
// kernel to drop pages: the kernel could wait for a page that is locked for this request.
func (fs *fileSystem) aside(call func()) { <-fs.apart(call) }

// apart runs call in a new goroutine and does not wait. ended is closed when call returns.
func (fs *fileSystem) apart(call func()) (ended <-chan struct{}) {
	done := make(chan struct{})
	fs.background.Go(func() {
		defer close(done)
		call()
	})
	return done
}

// await waits until ended is closed, but at least correctionPatience rounds, and then only until inVain returns true or
// mostCorrectionPatience rounds are over. It reports whether ended was closed.
func (fs *fileSystem) await(ended <-chan struct{}, inVain func() bool) bool {
	for round := range mostCorrectionPatience {
		if round >= correctionPatience && inVain() {
			break
		}
		select {
		case <-ended:
			return true
		case <-time.After(patienceRound):
		}
	}
	fs.impatient.Add(1)
	return false
}
