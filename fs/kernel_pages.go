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

// The kernel's page cache of a file is the CPU's replica. Dropping pages from it while a program writes has a race that
// ends with a reader getting old bytes for good:
//
//	write()        copies the new bytes into a page, unlocks the page, sends WRITE and waits
//	invalidation   drops that page: it is neither dirty nor locked
//	read()         finds no page, sends READ
//	daemon         answers READ from home, before it carries out WRITE
//
// The page that READ filled stays, with bytes older than what write() stored and returned for.
//
// The cure rests on this: the kernel holds the inode's lock from the copy into the page until WRITE is answered, so at
// most one such WRITE of an inode is in flight. A hazard begins when an invalidation starts. While it lasts, the ranges
// of READs that may fill the page cache are remembered, each before home is read. A WRITE that completes while the
// invalidation runs may have been in flight when its page was dropped; of those that complete later, only the first may
// have been, and it ends the hazard. If the bytes of such a WRITE overlap a remembered READ, these pages are dropped
// once more, before WRITE is answered, so that nobody who waited for write() sees the old page. The READ was remembered
// before it read home, hence before this WRITE changed home if what it got is old. The second invalidation waits for a
// READ that is still under way, because the kernel keeps its page locked. It needs no hazard of its own: the WRITE that
// causes it is home already and no other can have begun.
//
// Between the stale fill and the second invalidation a program that maps the page may store into it. Then the page goes
// home whole, with the bytes that WRITE had replaced. So while a hazard lasts, reads and writes exclude each other, and
// before a WRITE that overlaps a remembered READ changes home, home's pages are kept: they are what the stale pages
// were filled with. What the kernel writes back of such a page, until the second invalidation is done or the kernel
// asks for the page again, is merged by bytes against them. A kernel that asks for a page has none of it any more, and
// what it is given now has the WRITE's bytes: then a store of what was there before the WRITE is a store.
//
// WRITEs of pages that programs mapped do not count: such a page is dirty or under write-back until it is home, and an
// invalidation waits for that. Nor does O_DIRECT end a hazard, since several may be in flight. In one rare case the
// WRITE has the very page locked that is to be dropped: a partial write to a page that was not up to date. Waiting
// would never end, so the answer is given after a short while and the invalidation finishes behind it, with a hazard of
// its own from then on.

// A WRITE waits for pages to be dropped again for a number of rounds. An invalidation takes some microseconds, unless
// it waits for the lock of a page. Two can hold that lock: a reader whose READ was answered and who has yet to run, or
// the WRITE itself, which then waits in vain. A WRITE that gives up on a reader lets its own program read what it has
// just replaced. So it waits a few rounds, and goes on as long as some reader of its pages may not have run
// (readers.go).
//
// A round is not a fixed time: it is one short sleep of this process, and takes longer where processors are scarce.
const (
	correctionPatience     = 5
	mostCorrectionPatience = 5000
	patienceRound          = time.Millisecond
)

// maxRemembered is the number of ranges remembered before everything counts as read.
const maxRemembered = 64

// remembered is a range that was read.
type remembered struct {
	page.Bytes
	// invalidation is the number of the last invalidation that had begun.
	invalidation uint64
}

// hazard remembers what was read since an invalidation began. The zero hazard is none.
//
// A later invalidation drops for good what a read that was remembered before it began brought in, because the kernel
// had the page, locked or filled, by then. So when one ends, such reads in its range are forgotten. This keeps down how
// often a WRITE meets the rare case above, whose wait is in vain.
type hazard struct {
	// on is set while reads must be remembered, so that the common path takes no lock. Set before the invalidation is
	// sent, so every read that comes after a page was dropped sees it.
	on atomic.Bool

	mu         sync.Mutex
	running    int          // invalidations under way; protected by mu
	begun      uint64       // invalidations begun; protected by mu
	reads      []remembered // protected by mu
	everything bool         // reads is not all; protected by mu
	// reading has what each thread read last, unless it has written since. Protected by mu.
	reading map[uint32]page.Bytes

	// suspects are pages that the kernel may hold without what a WRITE brought home, with the bytes that it had of them
	// when it last agreed with home. Protected by content.gate: changed only while that is locked, but for doubts,
	// which counts the corrections under way.
	suspects map[page.Index]*suspect
	doubts   atomic.Int32
}

// suspect is a page that the kernel may have filled too early.
type suspect struct {
	base  [page.Size]byte
	users int // corrections that will drop it
	// fresh says that the kernel asked for the page again, so that it is no suspect. Set with the gate read-locked.
	fresh atomic.Bool
}

// lasts reports whether reads and writes have to exclude each other.
func (h *hazard) lasts() bool { return h.on.Load() || h.doubts.Load() > 0 }

// invalidationBegins must be called before the kernel is told. It returns the invalidation's number.
func (h *hazard) invalidationBegins() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running++
	h.begun++
	h.on.Store(true)
	return h.begun
}

// invalidationEnded must be called after the kernel answered, with what it dropped.
func (h *hazard) invalidationEnded(number uint64, dropped page.Bytes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running--
	h.reads = slices.DeleteFunc(h.reads, func(r remembered) bool {
		return r.invalidation < number && dropped.Off <= r.Off && r.End <= dropped.End
	})
}

// readAgain takes suspicion from the pages of n bytes at off, which the kernel asks for, to be given what home has now.
// The gate is read-locked.
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

// read remembers that a thread's READ of n bytes at off may get into the kernel's pages. It must be called before home
// is read.
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

// noteReader remembers what a thread reads. Beyond maxRemembered threads, all count as one that is not known.
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

// overlap returns the ranges to drop again after a thread's n bytes at off came home, and who else may be reading them.
func (h *hazard) overlap(off, n int64, thread uint32) (again []page.Bytes, by readers) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.on.Load() {
		return nil, by
	}
	w := pageSpan(off, n)
	if thread != unknownThread {
		delete(h.reading, thread) // it has come back from its READs
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

// written must be called when a WRITE came home of which no two can be in flight: it ends the hazard, unless an
// invalidation is still running.
func (h *hazard) written() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running == 0 {
		h.on.Store(false)
		h.reads, h.reading, h.everything = nil, nil, false
	}
}

// suspectPages keeps home's bytes of the pages of spans, which the kernel may hold without the WRITE that is about to
// change home. The kernel may have zeros in the page of end, from there on. The gate is locked.
func (h *hazard) suspectPages(spans []page.Bytes, fd int, end int64) {
	if len(spans) == 0 {
		return
	}
	h.doubts.Add(1)
	for _, s := range spans {
		for i := s.Pages().Start; i < s.Pages().End; i++ {
			x := h.suspects[i]
			if x == nil || x.fresh.Load() {
				again := new(suspect)
				// A page that cannot be read was not given to the kernel either.
				if err := readPage(fd, i, &again.base); err != nil {
					continue
				}
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

// readPage reads a page of the file that fd is open on, if only for writing or with O_PATH.
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

// trustPages ends what suspectPages began, once the kernel dropped the pages. The gate is locked.
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

// mergeSuspects returns what is to go home for data, which the kernel writes back at off: where a page is suspect, only
// the bytes that a program changed. The gate is locked.
func (h *hazard) mergeSuspects(data []byte, off int64, fd int) ([]byte, error) {
	merged, sent := data, page.Span(off, int64(len(data)))
	for i := sent.Pages().Start; i < sent.Pages().End; i++ {
		known := h.suspects[i]
		if known == nil || known.fresh.Load() {
			continue
		}
		if &merged[0] == &data[0] {
			merged = slices.Clone(data) // the request's buffer is not ours to change
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

// pageSpan returns the bytes of the pages that hold n bytes at off.
func pageSpan(off, n int64) page.Bytes { return page.Covering(off, n).Span() }

// kernelPages implements pagecache.KernelPages for whatever node has the inode at the time of the call: the kernel may
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
		return nil // the kernel knows no such inode, and has no page of it
	}
	return k.fs.invalidate(node, off, n)
}

// invalidate drops the kernel's pages of n bytes at off, or to the end if n is negative, and its attributes. No lock
// may be held that a request needs.
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

// dropPages tells the kernel to drop pages, without hazard.
func (fs *fileSystem) dropPages(node *node, off, n int64) error {
	switch status := fs.notify.InodeNotify(uint64(node.id), off, n); status {
	case fuse.OK, fuse.ENOENT: // ENOENT: the kernel forgot the inode
		return nil
	case fuse.Status(syscall.EBADF), fuse.ENODEV, fuse.Status(syscall.ENOTCONN):
		return nil // unmounted, so there are no pages
	default:
		return syscall.Errno(status)
	}
}

// correct has the kernel drop suspect pages again. It is called when a WRITE changed home, before it is answered and
// without any lock.
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
	// From now on it is an invalidation like others: the next WRITE may be in flight when its page goes. It forgets no
	// reads, which may be younger than what it drops.
	late := c.hazard.invalidationBegins()
	fs.background.Go(func() {
		<-ended
		c.hazard.invalidationEnded(late, page.Bytes{})
	})
}

// aside runs call in a goroutine of its own and waits for it. The goroutine that serves a request must not tell the
// kernel to drop pages itself: the kernel could wait for a page that this request has locked.
func (fs *fileSystem) aside(call func()) { <-fs.apart(call) }

// apart is aside that does not wait. ended is closed when call has ended.
func (fs *fileSystem) apart(call func()) (ended <-chan struct{}) {
	done := make(chan struct{})
	fs.background.Go(func() {
		defer close(done)
		call()
	})
	return done
}

// await waits for correctionPatience rounds, and then until inVain reports true, but not for ever. It reports whether
// ended was closed.
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
