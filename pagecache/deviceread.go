package pagecache

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Pages that home has are served to programs on the CPU from wherever they are there soonest: the host's page cache,
// what was read ahead from devices, a device that has them as home has, or the disk.
//
// A read gets what home had at some moment between its begin and its end, as one of home itself does; what follows from
// that for the kernel's pages is the same for both. File.mu is held to find out which device has what, and not while
// bytes are copied. What a device gave is home's because
//
//   - no program can have stored into the pages (lrc.Current, untracked, in extents that nobody was given for writing), and
//     nothing changed of them until they were copied: the epochs of their regions are those from before; or
//   - the digests of the copied bytes are those that the device agreed on with home when the read began.
//
// So a page that a program stores into is served from the device up to its first store, and again once it was released
// and collected.
//
// Nobody waits for a device for longer than a bound (patience), and then reads home. The copy that was given up keeps
// its buffer and its extents until it ends; meanwhile no read goes to that device.

// DeviceReads says when CPU reads of pages that home has are served from devices.
type DeviceReads uint8

const (
	// DeviceReadsAuto serves them from devices where that is faster.
	DeviceReadsAuto DeviceReads = iota
	// DeviceReadsAlways serves them from devices wherever that is possible, even what the host's page cache has. It
	// is for tests and measurements.
	DeviceReadsAlways
	// DeviceReadsOff serves them from home.
	DeviceReadsOff
)

// deviceReadWords are the words for them.
var deviceReadWords = [...]string{DeviceReadsAuto: "auto", DeviceReadsAlways: "always", DeviceReadsOff: "off"}

// DeviceReadsWords returns the words that DeviceReadsNamed knows.
func DeviceReadsWords() []string { return deviceReadWords[:] }

// DeviceReadsNamed returns what the word stands for. It panics if that is none of DeviceReadsWords.
func DeviceReadsNamed(word string) DeviceReads {
	for i, w := range deviceReadWords {
		if w == word {
			return DeviceReads(i)
		}
	}
	panic("no kind of device reads: " + word)
}

// HomeReader is home as a request reads it: through the descriptor of its own open, so that the host reads ahead for
// each open by itself. Its methods may be called from any goroutine.
type HomeReader interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
	// ReadCached is ReadAt if the host's page cache has all of it; otherwise it returns fewer bytes. Neither it nor
	// Cached should make the host read.
	ReadCached(p []byte, off int64) (int, error)
	// Cached reports whether the host's page cache has all of n bytes at off, which are bytes of the file. Where
	// that cannot be known it reports false.
	Cached(off, n int64) bool
	// Look is Home.Look.
	Look() (changes uint64, err error)
}

const (
	// A copy from a device is waited for patienceTimes as long as it was thought to take, but not shorter or longer
	// than this.
	leastPatience = 20 * time.Millisecond
	mostPatience  = 250 * time.Millisecond
	patienceTimes = 8

	// regionShift is the binary logarithm of the pages of a region, 2 MiB, and epochRegions the number of those
	// that have an epoch of their own.
	regionShift  = 9
	epochRegions = 64

	// probeBytes is the most that is read only to measure.
	probeBytes = 128 << 10
)

// patience is how long a copy is waited for that was thought to take so long.
func (c *Cache) patience(thought time.Duration) time.Duration {
	return max(min(patienceTimes*thought, mostPatience), c.leastPatience)
}

// changed notes that something of the pages of rg changes: what was found out about them, or read of them, is no longer
// known to be so. It is called with mu held, after home changed and before a device's bytes do.
func (f *File) changed(rg page.Range) {
	if rg.Empty() {
		return
	}
	states := f.lrc.Tables()
	f.c.memory.charge(memoryStates, states-f.states)
	f.states = states
	first, last := regionsOf(rg)
	for r := first; r <= min(last, first+epochRegions-1); r++ {
		f.epochs[r%epochRegions].Add(1)
	}
}

// epoch is the same number as before if nothing changed of the pages of rg.
func (f *File) epoch(rg page.Range) (sum uint64) {
	if rg.Empty() {
		return 0
	}
	first, last := regionsOf(rg)
	for r := first; r <= min(last, first+epochRegions-1); r++ {
		sum += f.epochs[r%epochRegions].Load()
	}
	return sum
}

// servesLocked reports whether devices may serve reads of the file: they hold something of it, and nobody changed home
// directly.
func (f *File) servesLocked() bool {
	if f.c.deviceReads == DeviceReadsOff {
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
	changes, err := f.home.Look()
	return err == nil && changes == f.changes
}

// deviceCopyPlan is what one device is to give of a read.
type deviceCopyPlan struct {
	*deviceCopy
	// epoch is that of pages when it was known that they are home's.
	epoch uint64
	// compare are those of pages that programs may have stored into, with the digests of home's.
	compare []comparison
}

type comparison struct {
	pages  page.Range
	agreed []gpubackend.Digest
}

// have is the pages of a range that a device has as home has them.
type have struct {
	h *holding
	// pages are all, compare those that programs may be storing into.
	pages, compare []page.Range
}

// havesLocked returns what devices have of rg.
func (f *File) havesLocked(rg page.Range) (all []have) {
	if f.doubtfulLocked(rg) {
		return nil
	}
	for h := range f.holdersLocked() {
		if h.empty() || h.dev.lost.Load() {
			continue
		}
		unwritten, written := f.sourcesLocked(h, h, rg)
		if len(written) > 0 && f.isTorn(rg) {
			written = nil
		}
		if len(unwritten)+len(written) > 0 {
			all = append(all, have{h, union(unwritten, written), written})
		}
	}
	return all
}

// copyLocked makes a plan of copying pages that x has.
func (f *File) copyLocked(x have, pages page.Range) *deviceCopyPlan {
	p := &deviceCopyPlan{deviceCopy: x.h.newCopyLocked(pages), epoch: f.epoch(pages)}
	for _, rg := range intersect(x.compare, []page.Range{pages}) {
		c := comparison{pages: rg, agreed: make([]gpubackend.Digest, 0, rg.Len())}
		x.h.each(rg, func(y *extent, part page.Range) { c.agreed = append(c.agreed, y.agreedAt(part)...) })
		p.compare = append(p.compare, c)
	}
	return p
}

// verify returns the pages of p, copied, that are not known to be what home has.
func (f *File) verify(p *deviceCopyPlan) (doubtful page.Range) {
	sums := make([]gpubackend.Digest, 0, 32)
	compared := int64(0)
	for _, c := range p.compare {
		compared += c.pages.Len()
		sums = append(sums[:0], c.agreed...)
		at := (c.pages.Start - p.pages.Start).Offset()
		p.dev.Key().SumPages(p.Buf()[at:at+c.pages.Bytes()], sums)
		for i := range sums {
			if sums[i] == c.agreed[i] {
				continue
			}
			bad := c.pages.Start + page.Index(i)
			if doubtful.Empty() {
				doubtful.Start = bad
			}
			doubtful.End = bad + 1
		}
	}
	if !doubtful.Empty() {
		f.setTorn(doubtful, p.epoch == f.epoch(p.pages))
	}
	if compared < p.pages.Len() && f.epoch(p.pages) != p.epoch {
		return p.pages
	}
	return doubtful
}

// Pages that a program stored into and did not release are copied in vain every time. So where one was found, its
// region's tracked pages are left alone until something changes.

func (f *File) isTorn(rg page.Range) bool {
	for r, last := regionsOf(rg); r <= last; r++ {
		if i := r % epochRegions; f.torn[i].Load() == f.epochs[i].Load()+1 {
			return true
		}
	}
	return false
}

// setTorn remembers it; unless nothing changed meanwhile, it says nothing about what is now.
func (f *File) setTorn(rg page.Range, now bool) {
	for r, last := regionsOf(rg); now && r <= last; r++ {
		i := r % epochRegions
		f.torn[i].Store(f.epochs[i].Load() + 1)
	}
}

// union returns the pages that are in a or b, which have none in common.
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

// readDevices serves a read of len(p) bytes at off of the size of the file, of which nothing is pending. follow says
// that others like it are expected to come.
func (f *File) readDevices(ctx context.Context, p []byte, off, size int64, home HomeReader, follow bool) (n int, err error) {
	c := f.c
	if follow && c.fetchesMore {
		// Before the read itself: the next ones may be under way already, and are to find that somebody fetches
		// their pages.
		f.readAhead(ctx, f.expect(page.Covering(off, int64(len(p))), size), home)
	}
	n, late := f.readClean(p, off)
	if n == len(p) {
		return n, nil
	}
	rest, at := p[n:], off+int64(n)
	if c.deviceReads != DeviceReadsAlways && !late {
		if m, err := home.ReadCached(rest, at); err == nil && m == len(rest) {
			f.count(func(c *Counters) { c.HostReads.Add(1); c.HostReadBytes.Add(int64(m)) })
			return n + m, nil
		}
	}
	m, failed := 0, late
	if !failed {
		m, failed = f.readAround(ctx, rest, at, size)
	}
	switch {
	case m > 0:
	case failed:
		m, err = f.fromHome(home, rest, at)
	default:
		m, err = f.readDeviceOrHome(ctx, rest, at, home)
	}
	return n + m, err
}

// readDeviceOrHome reads from a device, from home, or from both at once.
func (f *File) readDeviceOrHome(ctx context.Context, p []byte, off int64, home HomeReader) (n int, err error) {
	c, want := f.c, int64(len(p))
	if err := f.mu.LockIn(ctx); err != nil {
		return 0, err
	}
	plan := f.planLocked(off, want)
	f.mu.Unlock()
	if plan == nil || !plan.Start() {
		return f.fromHome(home, p, off)
	}
	// The device gives the beginning, the end, or all.
	lo := max(plan.pages.Offset(), off) - off
	hi := min(plan.pages.End.Offset(), off+want) - off
	// Home's part first: it is at most one of these.
	before, err := f.fromHome(home, p[:lo], off)
	after := 0
	if err == nil && hi < want {
		after, err = f.fromHome(home, p[hi:], off+hi)
	}
	if !c.wait(plan.deviceCopy) {
		f.count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
		if err != nil || int64(before) < lo {
			return before, err
		}
		n, err = f.fromHome(home, p[lo:hi], off+lo)
		if err != nil || int64(n) < hi-lo { // the file has become shorter
			return before + n, err
		}
		return before + n + after, nil
	}
	defer plan.Finish()
	if err != nil || int64(before) < lo {
		return before, err
	}
	doubtful := plan.pages
	if plan.Err() == nil {
		doubtful = f.verify(plan)
	}
	from := off + lo - plan.pages.Offset()
	copied := 0
	if plan.Err() == nil {
		copied = copy(p[lo:hi], plan.Buf()[from:])
	}
	if !doubtful.Empty() {
		f.count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
		a, b := max(doubtful.Offset()-off, lo), min(doubtful.End.Offset()-off, hi)
		m, err := f.fromHome(home, p[a:b], off+a)
		copied -= m
		if err != nil || int64(m) < b-a { // the file has become shorter
			return int(a) + m, err
		}
	}
	if copied > 0 {
		f.count(func(c *Counters) { c.DeviceReads.Add(1); c.DeviceReadBytes.Add(int64(copied)) })
	}
	return int(hi) + after, nil
}

// fromHome is homeRead, counted.
func (f *File) fromHome(home HomeReader, p []byte, off int64) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err = f.c.homeRead(home, p, off)
	f.countHome(n)
	return n, err
}

func (f *File) countHome(n int) {
	f.count(func(c *Counters) { c.DiskReads.Add(1); c.DiskReadBytes.Add(int64(n)) })
}

// planLocked decides where n bytes at off come from; nil: from home alone. What home gives besides a device is one
// piece, so a device is only asked for the beginning or the end.
func (f *File) planLocked(off, n int64) (plan *deviceCopyPlan) {
	if f.detached.Load() || off+n > f.size {
		return nil
	}
	rg := page.Covering(off, n)
	var best have
	var pages page.Range
	var idle []have
	haves := f.havesLocked(rg)
	disk := f.c.disk.Now()
	took := disk.Time(n)
	for _, x := range haves {
		first, last := x.pages[0], x.pages[len(x.pages)-1]
		d, s := x.h.dev, x.h.dev.moves.Cost.Now()
		if s.Stuck() {
			continue
		}
		idle = append(idle, x)
		switch {
		case first.Start == rg.Start:
			most := min(first.End.Offset(), off+n) - off
			if f.c.deviceReads == DeviceReadsAlways {
				if best.h == nil || first.End > pages.End {
					best, pages = x, first
				}
				continue
			}
			give, t := most, s.Time(most)+disk.Time(n-most) // where the reader copies himself, one after the other
			if d.info.CopyEngines {
				give, t = cost.Split(&s, &disk, n, most, page.Size)
			}
			if give > 0 && give < most {
				give = (off+give)&^(page.Size-1) - off // whole pages
			}
			if give > 0 && t < took {
				best, took, pages = x, t, page.Covering(off, give)
			}
		case last.End == rg.End:
			most := off + n - last.Offset()
			t := s.Time(most) + disk.Time(n-most)
			if d.info.CopyEngines {
				t = max(s.Time(most), disk.Time(n-most))
			}
			if t < took || f.c.deviceReads == DeviceReadsAlways && best.h == nil {
				best, took, pages = x, t, last
			}
		}
	}
	f.probeLocked(rg, idle, best.h)
	if best.h == nil {
		return nil
	}
	s := best.h.dev.moves.Cost.Now()
	plan = f.copyLocked(best, pages)
	plan.beUrgent(s.Time(pages.Bytes()))
	return plan
}

// probeLocked measures what was not chosen, if that is due, without anybody waiting for it.
func (f *File) probeLocked(rg page.Range, haves []have, chosen *holding) {
	c := f.c
	if c.deviceReads != DeviceReadsAuto {
		return
	}
	if chosen != nil && c.disk.Due() {
		f.probeHomeLocked(rg)
	}
	for _, x := range haves {
		d := x.h.dev
		if x.h == chosen || d.lost.Load() || !d.moves.Cost.Due() {
			continue
		}
		pages := x.pages[0]
		pages.End = min(pages.End, pages.Start+probeBytes>>page.Shift)
		j := x.h.newCopyLocked(pages)
		if !c.inBackground(func() {
			defer d.moves.Cost.Measured()
			if j.Start() {
				<-j.Done()
				j.Finish()
			}
		}) {
			j.Drop()
			d.moves.Cost.Measured()
		}
	}
}

// probeHomeLocked reads what a device is about to give from home too.
func (f *File) probeHomeLocked(rg page.Range) {
	c, home := f.c, f.home
	rg.End = min(rg.End, rg.Start+probeBytes>>page.Shift)
	f.beginRead()
	if !c.inBackground(func() {
		defer c.disk.Measured()
		defer f.endRead()
		buf := takeBuffer()
		defer giveBuffer(buf)
		_, _ = c.homeRead(bareHome{home}, buf[:rg.Bytes()], rg.Offset())
	}) {
		f.endRead()
		c.disk.Measured()
	}
}

// bareHome is a HomeReader of which nobody asks what the host has.
type bareHome struct{ Home }

func (bareHome) ReadCached([]byte, int64) (int, error) { return 0, nil }
func (bareHome) Cached(int64, int64) bool              { return false }

// inBackground calls do in a goroutine that Close waits for. It reports false where the Cache is being closed.
func (c *Cache) inBackground(do func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.deviceCalls.Add(1)
	go func() {
		defer c.deviceCalls.Done()
		do()
	}()
	return true
}
