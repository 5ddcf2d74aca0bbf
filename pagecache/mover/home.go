package mover

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// What the host's page cache lacks comes from the disk past it, for GPUs read more than it holds, and what programs on
// the CPU use would have to go. What it has is copied from there, also where a few of its pages lie between others:
// they, and not the disk, are what everybody else sees.
const (
	// DirectReads is how many pieces are read from the disk at once.
	DirectReads = 16
	// MixedRun is the smallest run that is looked at in halves where the host's page cache has some of it.
	MixedRun = 64 << 10
)

// Home is a backing file as buffered I/O sees it. Its methods, and those of the interfaces below, may be called from
// any goroutine.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
}

// HostCached is a Home that says what the host's page cache has of it.
type HostCached interface {
	Home
	// ReadCached is ReadAt of what can be read without waiting for a disk. It returns fewer bytes where that is not
	// all.
	ReadCached(p []byte, off int64) (int, error)
	// WillNeed has the host begin to read n bytes at off. It is a hint, and does not wait for them.
	WillNeed(off, n int64)
}

// DirectReader is a HostCached that can be read past the host's page cache. Its methods, ReadAt and ReadCached may be
// called while others change the file. Offsets, lengths, and the addresses of buffers are multiples of page.Size.
type DirectReader interface {
	HostCached
	// Cached returns how many of the n bytes at off the host's page cache has, or is about to have: whole pages.
	Cached(off, n int64) (int64, error)
	// ReadDirect is ReadAt of pages that the host's page cache does not have, and leaves it as it is. Anything may be
	// in p behind what was read.
	ReadDirect(p []byte, off int64) (int, error)
	// Drop has the host's page cache give up the n bytes at off, as far as nobody changed them or maps them. It is a
	// hint.
	Drop(off, n int64)
}

// NoDirect is the error of a DirectReader that will never do what was asked for.
type NoDirect struct {
	// Reason is for people, and the same for all files with one and the same obstacle.
	Reason string
}

func (e *NoDirect) Error() string { return "no reads past the host's page cache: " + e.Reason }

// Ways counts the pages of home by the way that they came: from the host's page cache, from the disk past it, and from
// the disk through it.
type Ways struct{ Cached, Direct, Buffered int64 }

// Add adds o.
func (w *Ways) Add(o Ways) {
	w.Cached, w.Direct, w.Buffered = w.Cached+o.Cached, w.Direct+o.Direct, w.Buffered+o.Buffered
}

// Source is a Home as one Fill reads it.
type Source struct {
	Home Home
	// Direct is Home where it may be read past the host's page cache, or nil. The rest is for that.
	Direct DirectReader
	// Cold chooses the way of large reads past the page cache or through it; nil for past it.
	Cold *ColdWay
	// Size is that of the file. What lies behind reads as zero.
	Size int64
	// Hold keeps Home open until giveBack is called. Both are called without any lock.
	Hold func() (giveBack func())
	// Refused is called without any lock when Home said that it will never be read so.
	Refused func(reason string)

	never atomic.Pointer[string] // why Home refused for good; nil once that was reported
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

// refused goes on after an error: where that is for good the file is not read so any more.
func (d *Source) refused(err error) {
	var never *NoDirect
	if errors.As(err, &never) {
		d.never.Store(&never.Reason)
	}
}

// ask has Direct be nil where Home says of a page that it will never be read past the host's page cache. Otherwise each
// piece would be read apart, as if it came from a disk.
func (d *Source) ask(of page.Index) {
	if _, err := d.Direct.Cached(of.Offset(), page.Size); err == nil {
		return
	} else if d.refused(err); d.never.Load() != nil {
		d.Direct = nil
		d.report()
	}
}

// report tells what refused noted.
func (d *Source) report() {
	if reason := d.never.Swap(nil); reason != nil {
		d.Refused(*reason)
	}
}

// read reads pages, of which those past end of file are zeros. Where the host's page cache has none of them, through
// says which way they come.
func (d *Source) read(p []byte, off int64, through bool) (w Ways, err error) {
	all := int64(len(p)) >> page.Shift
	if most := page.Count(d.Size).Offset() - off; int64(len(p)) > most {
		most = max(most, 0)
		clear(p[most:])
		p = p[:most]
	}
	err = d.readParts(p, off, through, &w)
	w.Cached += all - w.Cached - w.Direct - w.Buffered // what lies past end of file costs nothing
	return w, err
}

func (d *Source) readParts(p []byte, off int64, through bool, w *Ways) error {
	n := int64(len(p))
	if n == 0 {
		return nil
	}
	cached, err := d.Direct.Cached(off, n)
	switch {
	case err != nil:
		d.refused(err)
	case cached == 0 && through:
		d.Direct.WillNeed(off, n)   // all of it at once
		defer d.Direct.Drop(off, n) // the page cache does not keep what it did not have
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
		if err := d.readParts(p[:half], off, false, w); err != nil {
			return err
		}
		return d.readParts(p[half:], off+half, false, w)
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

// readBuffered reads pages as everybody does.
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

// warm reports whether the host's page cache seems to have all of a piece, of which it looks at three pages: looking at
// all of them takes some percent of the time that copying them does.
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

// readRun reads pages that lie side by side, by the way that the disk's round takes if they are many.
func (d *Source) readRun(p []byte, off int64) (w Ways, err error) {
	if d.Cold == nil || len(p) < LeastPiece {
		return d.read(p, off, false)
	}
	r := d.Cold.begin(int64(len(p)), time.Now())
	w, err = d.read(p, off, r.through)
	d.Cold.end(r, time.Now(), err)
	return w, err
}

// readSteps reads the steps of a piece into buf, up to so many at once.
func (d *Source) readSteps(steps []page.Range, buf []byte, atOnce int) (w Ways, err error) {
	if len(steps) == 1 {
		return d.readRun(buf, steps[0].Offset())
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
			x, e := d.read(part, s.Offset(), false)
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
