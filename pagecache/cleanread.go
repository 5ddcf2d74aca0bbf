package pagecache

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
)

// Package cleanread serves CPU reads of bytes that home has from devices. This file tells it who has what.

// DeviceReads says when devices serve CPU reads of pages that home has too.
type DeviceReads = cleanread.When

// The values of DeviceReads.
const (
	DeviceReadsAuto   = cleanread.Auto
	DeviceReadsAlways = cleanread.Always
	DeviceReadsOff    = cleanread.Off
)

// DeviceReadsWords returns the names of the values, for DeviceReadsNamed.
func DeviceReadsWords() []string { return cleanread.Words() }

// DeviceReadsNamed returns the value that word names. It panics if word is not one of DeviceReadsWords.
func DeviceReadsNamed(word string) DeviceReads { return cleanread.Named(word) }

// HomeReader is how a read request sees home.
type HomeReader = cleanread.Home

const (
	// The clean cache may take 1/cleanShare of Options.HostMemory, but at most cleanMost bytes.
	cleanShare = 2
	cleanMost  = 4 << 30
)

// newCleanCache makes the cache that serves CPU reads from devices.
func (c *Cache) newCleanCache(when DeviceReads) (clean *cleanread.Cache, err error) {
	o := cleanread.Options{
		When:   when,
		Limit:  min(c.memory.limit/cleanShare, cleanMost),
		Charge: func(n int64) { c.memory.charge(memoryClean, n) },
		Fits:   func() bool { return c.memory.fits(0) },
	}
	for _, d := range c.devices {
		d.serves = &cleanread.Device{Moves: d.moves, Key: d.Key(), Engines: d.info.CopyEngines, Lost: d.lost.Load}
		o.Devices = append(o.Devices, d.serves)
	}
	return cleanread.New(o)
}

// closePatience is how long Close waits for devices that do not answer.
const closePatience = 5 * time.Second

// endCopies stops new copies for CPU reads and waits for those under way, at most for closePatience.
func (c *Cache) endCopies() {
	defer c.clean.Close()
	for _, d := range c.devices {
		d.moves.Close()
	}
	ended := make(chan struct{})
	go func() {
		c.waitCopies()
		close(ended)
	}()
	timer := time.NewTimer(closePatience)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		c.log.Error("a device does not answer; the mount ends without waiting for it")
	}
}

// waitCopies waits for copies for CPU reads that are under way, and for background work that depends on them.
func (c *Cache) waitCopies() {
	for _, d := range c.devices {
		d.moves.Wait()
	}
	c.clean.Wait()
}

// changed reports that the pages of rg are changing: see cleanread.File.Changed. It is called with mu held.
func (f *File) changed(rg page.Range) {
	if rg.Empty() {
		return
	}
	states := f.lrc.Tables()
	f.c.memory.charge(memoryStates, states-f.states)
	f.states = states
	f.clean.Changed(rg)
	f.flights.setShown(rg, false)
}

// servesLocked reports whether devices may serve reads of the file: they hold some of it, and home was not changed
// directly.
func (f *File) servesLocked() bool {
	if f.c.clean.When == DeviceReadsOff {
		return false
	}
	held := false
	for _, h := range f.holdings {
		if held = !h.empty(); held {
			break // of many devices
		}
	}
	if !held {
		return false
	}
	return f.home.AsSeen() == nil
}

// havesLocked returns what devices have of rg that equals home. If a copy of a tracked page was found torn in the
// regions of rg, it leaves out pages that programs may be storing into. digests asks for the agreed digests of such
// pages.
func (f *File) havesLocked(rg page.Range, digests bool) (all []cleanread.Have) {
	if f.doubtfulLocked(rg) {
		return nil
	}
	for h := range f.holdersLocked() {
		if h.empty() || h.dev.lost.Load() {
			continue
		}
		unwritten, written := f.sourcesLocked(h, h, rg)
		if len(written) > 0 && f.clean.Torn(rg) {
			written = nil
		}
		if len(unwritten)+len(written) == 0 {
			continue
		}
		x := cleanread.Have{Device: h.dev.serves, Pages: union(unwritten, written), Tracked: written}
		h.each(rg, func(y *extent, _ page.Range) { x.Extents = append(x.Extents, y.Extent) })
		for _, run := range written {
			if digests {
				h.each(run, func(y *extent, part page.Range) { x.Agreed = append(x.Agreed, y.agreedAt(part)...) })
			}
		}
		all = append(all, x)
	}
	return all
}

// union returns the pages that are in a or in b, ascending and joined. Both are ascending.
func union(a, b []page.Range) (out []page.Range) {
	for len(a) > 0 || len(b) > 0 {
		if len(b) == 0 || len(a) > 0 && a[0].Start < b[0].Start {
			out, a = page.AppendRange(out, a[0]), a[1:]
		} else {
			out, b = page.AppendRange(out, b[0]), b[1:]
		}
	}
	return out
}

// executor is the view that package cleanread has of a File.
type executor struct{ f *File }

// Facts implements cleanread.Executor.
func (e executor) Facts(ctx context.Context, rg page.Range) *cleanread.Facts {
	f := e.f
	if f.mu.LockIn(ctx) != nil {
		return nil
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return nil
	}
	return f.clean.Facts(rg, f.home.Size(), f.havesLocked(rg, true))
}

// NothingPending implements cleanread.Executor.
func (e executor) NothingPending(pages page.Range, entering bool) bool {
	if e.f.flights.overlap(pages) || len(e.f.lrc.Pending(pages, true)) > 0 {
		return false
	}
	if entering {
		e.f.lrc.CPURead(pages)
	}
	return true
}

// Haves implements cleanread.Executor.
func (e executor) Haves(pages page.Range) []cleanread.Have { return e.f.havesLocked(pages, false) }

// BorrowHome implements cleanread.Executor.
func (e executor) BorrowHome() (readAt func(p []byte, off int64) (int, error), giveBack func()) {
	f := e.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return nil, nil
	}
	f.home.BeginRead()
	return f.home.Backing().ReadAt, f.home.EndRead
}

// Push implements cleanread.Executor.
func (e executor) Push(off int64, p []byte, current func() bool) bool {
	e.f.mu.Lock()
	kernel := e.f.kernel.Pages()
	e.f.mu.Unlock()
	return kernel.Push(off, p, current)
}

// Count implements cleanread.Executor.
func (e executor) Count(fn func(c *cleanread.Counters)) {
	e.f.count(func(c *Counters) { fn(&c.Counters) })
}
