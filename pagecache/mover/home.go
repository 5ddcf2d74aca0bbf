package mover

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

// What the host's page cache lacks is read from the disk past it: GPUs read more than it holds, and would evict what
// programs on the CPU use. What it has is copied from there, even a few pages among others: everybody else sees these
// pages, not the disk.
const (
	// DirectReads is how many pieces are read from the disk at once.
	DirectReads = 16
	// MixedRun is the smallest run that is split into halves if the host's page cache has some of it.
	MixedRun = 64 << 10
)

// Home is a backing file as buffered I/O sees it. Its methods, and those of the interfaces below, may be called from
// any goroutine.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at the end of the file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
}

// HostCached is a Home that knows what the host's page cache has of it.
type HostCached interface {
	Home
	// ReadCached is ReadAt without waiting for a disk. It returns fewer bytes if not all of them are cached.
	ReadCached(p []byte, off int64) (int, error)
	// WillNeed asks the host to start reading n bytes at off. It is a hint, and does not wait for them.
	WillNeed(off, n int64)
}

// DirectReader is a HostCached that can be read past the host's page cache. Its methods may be called while others
// change the file. Offsets, lengths, and the addresses of buffers are multiples of page.Size.
type DirectReader interface {
	HostCached
	// Cached returns how many of the n bytes at off the host's page cache has, or will soon have, in whole pages.
	Cached(off, n int64) (int64, error)
	// ReadDirect is ReadAt for pages that the host's page cache does not have. It does not add them. The bytes of p
	// after those that it read are undefined.
	ReadDirect(p []byte, off int64) (int, error)
	// Drop asks the host's page cache to give up the n bytes at off, except those that are changed or mapped. It is a
	// hint.
	Drop(off, n int64)
}

// Locked is page-locked pages of a file, in the host's page cache. Its method may be called from any goroutine.
type Locked interface {
	// At returns memory that shows the n bytes at off, or nil if they are not locked, or not in one piece. It is valid
	// until Run has returned. Reading it faults if the file has become shorter (package mapped).
	At(off, n int64) []byte
}

// NoDirect is the error of a DirectReader that can never be read past the page cache.
type NoDirect struct {
	// Reason is for people. Files with the same obstacle have the same reason.
	Reason string
}

func (e *NoDirect) Error() string { return "no reads past the host's page cache: " + e.Reason }

// Ways counts pages of home by the way they came: from where they are locked, from the host's page cache, from the disk
// past it, or from the disk through it.
type Ways struct{ Locked, Cached, Direct, Buffered int64 }

// Add adds o.
func (w *Ways) Add(o Ways) {
	w.Locked, w.Cached = w.Locked+o.Locked, w.Cached+o.Cached
	w.Direct, w.Buffered = w.Direct+o.Direct, w.Buffered+o.Buffered
}

// Source is a Home, as one Fill reads it.
type Source struct {
	Home Home
	// Locked has pages of Home that devices copy from where they are, except one that the file has only in part; nil if
	// there are none.
	Locked Locked
	// Direct is Home if it may be read past the host's page cache, or nil. The other fields are for that, and Size also
	// for Locked.
	Direct DirectReader
	// Cold knows the way of large reads, past the page cache or through it; nil means past it.
	Cold *ColdFile
	// Size is the size of the file. Bytes after it read as zero.
	Size int64
	// Hold keeps Home open until giveBack is called. Both are called without any lock.
	Hold func() (giveBack func())
	// Refused is called without any lock when Home says that it can never be read past the page cache.
	Refused func(reason string)

	asked bool                   // Ask has run
	never atomic.Pointer[string] // why Home refused for good; nil after that was reported
}

// hold keeps a Source open for several reads.
type hold struct {
	users    atomic.Int32
	from     *Source
	giveBack func()
}

func newHold(from *Source) *hold {
	h := &hold{from: from, giveBack: from.Hold()}
	h.users.Store(1)
	return h
}

func (h *hold) drop() {
	if h.users.Add(-1) == 0 {
		h.giveBack()
	}
}

// refused handles an error of Direct. If it is for good, it notes the reason for report.
func (d *Source) refused(err error) {
	var never *NoDirect
	if errors.As(err, &never) {
		d.never.Store(&never.Reason)
	}
}

// Ask clears Direct and Size if Home can never be read past the host's page cache. Otherwise each piece would be read
// separately, as if from a disk. Run asks, unless the caller has. Ask before other goroutines see the Source.
func (d *Source) Ask(of page.Index) {
	if d.Direct == nil || d.asked {
		return
	}
	d.asked = true
	if _, err := d.Direct.Cached(of.Offset(), page.Size); err == nil {
		return
	} else if d.refused(err); d.never.Load() != nil {
		d.Direct, d.Size = nil, 0
		d.report()
	}
}

// report calls Refused if refused noted a reason.
func (d *Source) report() {
	if reason := d.never.Swap(nil); reason != nil {
		d.Refused(*reason)
	}
}

// read reads pages; those past the end of the file are zeros.
func (d *Source) read(p []byte, off int64) (w Ways, err error) {
	part, beyond := d.inFile(p, off)
	err = d.readParts(part, off, &w)
	w.Cached += beyond
	return w, err
}

// readThrough reads pages through the host's page cache, whatever it has of them.
func (d *Source) readThrough(p []byte, off int64) (w Ways, err error) {
	part, beyond := d.inFile(p, off)
	err = d.readBuffered(part, off, &w)
	w.Cached += beyond
	return w, err
}

// inFile returns the part of p that the file has. It clears the other pages, which cost nothing, and returns their
// number.
func (d *Source) inFile(p []byte, off int64) (part []byte, beyond int64) {
	n := min(max(page.Count(d.Size).Offset()-off, 0), int64(len(p)))
	clear(p[n:])
	return p[:n], (int64(len(p)) - n) >> page.Shift
}

func (d *Source) readParts(p []byte, off int64, w *Ways) error {
	n := int64(len(p))
	if n == 0 {
		return nil
	}
	cached, err := d.Direct.Cached(off, n)
	switch {
	case err != nil:
		d.refused(err)
	case cached == 0:
		got, err := d.Direct.ReadDirect(p, off)
		if err == nil {
			clear(p[got:])
			w.Direct += n >> page.Shift
			return nil
		}
		d.refused(err)
	case cached < n && n > MixedRun:
		half := page.Count(n / 2).Offset()
		if err := d.readParts(p[:half], off, w); err != nil {
			return err
		}
		return d.readParts(p[half:], off+half, w)
	case cached == n:
		got, err := d.Direct.ReadCached(p, off)
		if err != nil {
			return err
		}
		whole := int64(got) &^ (page.Size - 1)
		w.Cached += whole >> page.Shift
		p, off = p[whole:], off+whole
	}
	return d.readBuffered(p, off, w)
}

// readBuffered reads pages through the host's page cache.
func (d *Source) readBuffered(p []byte, off int64, w *Ways) error {
	if len(p) == 0 {
		return nil
	}
	got, err := d.Home.ReadAt(p, off)
	if err != nil {
		return err
	}
	clear(p[got:])
	w.Buffered += int64(len(p)) >> page.Shift
	return nil
}

// warm reports whether the host's page cache seems to have all of a piece. It checks three pages: checking all would
// take some percent of the time that copying them does.
func (d *Source) warm(x *Piece) bool {
	n := len(x.Steps)
	first, last := x.Steps[0].Pages, x.Steps[n-1].Pages
	middle := x.Steps[n/2].Pages
	end := page.Count(d.Size)
	for k, i := range [...]page.Index{first.Start, last.End - 1, middle.Start + page.Index(middle.Len()/2)} {
		if i >= end || k > 0 && i == first.Start {
			continue
		}
		cached, err := d.Direct.Cached(i.Offset(), page.Size)
		if err != nil {
			d.refused(err)
			return false
		}
		if cached == 0 {
			return false
		}
	}
	return true
}

// readSteps reads the steps of a piece into buf, up to atOnce at a time.
func (d *Source) readSteps(steps []page.Range, buf []byte, atOnce int) (w Ways, err error) {
	if len(steps) == 1 {
		return d.read(buf, steps[0].Offset())
	}
	var mu sync.Mutex
	var group sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	at := int64(0)
	for _, s := range steps {
		part := buf[at : at+s.Bytes()]
		at += s.Bytes()
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			x, e := d.read(part, s.Offset())
			mu.Lock()
			defer mu.Unlock()
			w.Add(x)
			if err == nil {
				err = e
			}
		})
	}
	group.Wait()
	return w, err
}
