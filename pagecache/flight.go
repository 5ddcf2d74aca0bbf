package pagecache

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/home"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A CPU read of released bytes does not wait until they are written home. Bytes fetched and merged for home stay in
// memory for a while, as a flight, and are written home concurrently. docs/dev/adr/0017-reads-before-home.md has the
// reasons. The rules:
//
// Home means the backing file with the pages of flights laid over it. The lrc machine, digests and bases use home in
// this sense, so a portion that flies counts as collected. The backing file lags behind only in the pages of flights.
// Two kinds of readers look at flights: CPU reads (Read, readOverLocked), and reads of home by this package
// (readHomeLocked, overHome). All other code that reads or changes the backing file first brings home the flights of
// the pages concerned (landLocked): ChangeHome, ReadRange, Sync, fills of views, and every collect that does not create
// flights. So readers of the backing file hear of the bytes when they land (spoilLocked), not when they begin to fly.
//
// A flight holds whole pages inside the file. Its bytes never change. Flights do not overlap: pages that are collected
// again replace the old ones. Flights are created, landed and removed with File.mu locked. If home refuses the bytes,
// the flight stays, waits like other released bytes, and is tried again; until it succeeds the file gets no new
// flights. Flights survive the loss of a device.
//
// A read takes bytes from a flight without File.mu while the flight is shown. Nothing is pending in the pages of a
// shown flight, and they count as pages that the kernel may hold. Code that changes a page calls File.changed first,
// which hides the flight. A release does so before the kernel drops pages, so the kernel waits for every read that
// found the flight shown.

const (
	// leastFlight is the least number of pages that a read must fetch from devices for them to fly: 64 KiB. Fewer are
	// written home at once.
	leastFlight = 16
	// Flights may take 1/flightShare of Options.HostMemory, but at most mostFlights pages: 128 MiB. Half of that stays
	// until no read has used a flight for landPause: a read of a flight waits for nobody, but a read of bytes that have
	// just landed waits for File.mu.
	flightShare = 4
	mostFlights = 2 * holdCollect
	landPause   = 20 * time.Millisecond
)

// leastFlightFor returns leastFlight as DeviceReads modifies it.
func leastFlightFor(when DeviceReads) int64 {
	switch when {
	case DeviceReadsAlways:
		return 1
	case DeviceReadsOff:
		return math.MaxInt64
	}
	return leastFlight
}

// flight is the memory of a portion that readers can see before home has it.
type flight struct {
	f       *File
	portion *portion
	bytes   int64 // as charged to the account
	born    int64 // later flights of the file have higher numbers; immutable
	// users counts the runs that are not home yet, and the reads that copy from them.
	users atomic.Int64
}

// drop ends n uses. The last one frees the memory.
func (x *flight) drop(n int64) {
	if x.users.Add(-n) == 0 {
		x.portion.free()
		x.f.c.memory.charge(memoryFlights, -x.bytes)
	}
}

// flown is a run of pages of a flight.
type flown struct {
	pages page.Range
	bytes []byte // immutable
	of    *flight
	shown bool
}

// part returns the pages rg of the run. rg must lie inside the run.
func (x flown) part(rg page.Range) flown {
	x.bytes = x.bytes[(rg.Start - x.pages.Start).Offset():][:rg.Bytes():rg.Bytes()]
	x.pages = rg
	return x
}

// flights are the flights of a file. Runs are added and removed with both File.mu and mu held.
type flights struct {
	n    atomic.Int32 // len(runs), for readers without mu
	mu   sync.Mutex
	runs []flown // ascending, without overlaps; protected by mu
	// leads are what was brought early for programs that read in order. Protected by mu.
	leads leads
	born  int64        // counts flights; protected by File.mu
	used  atomic.Int64 // counts reads
}

// firstLocked returns the index of the first run that ends after page p.
func (s *flights) firstLocked(p page.Index) int {
	i, _ := slices.BinarySearchFunc(s.runs, p, func(x flown, p page.Index) int { return int(x.pages.End - 1 - p) })
	return i
}

// any reports whether there are flights.
func (s *flights) any() bool { return s.n.Load() > 0 }

// overlap reports whether any page of rg flies.
func (s *flights) overlap(rg page.Range) bool {
	if !s.any() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.firstLocked(rg.Start)
	return i < len(s.runs) && s.runs[i].pages.Overlaps(rg)
}

// in returns the runs that overlap rg: up to most pages, but at least one run. File.mu is held.
func (s *flights) in(rg page.Range, most int64) (list []flown) {
	if !s.any() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := s.firstLocked(rg.Start); i < len(s.runs) && s.runs[i].pages.Overlaps(rg); i++ {
		if most -= s.runs[i].pages.Len(); most < 0 && len(list) > 0 {
			break
		}
		list = append(list, s.runs[i])
	}
	return list
}

// oldest returns runs of the oldest flights, ascending: up to most pages, but at least one run. File.mu is held.
func (s *flights) oldest(most int64) (list []flown) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for last := int64(math.MinInt64); ; {
		first := -1
		for i, x := range s.runs {
			if x.of.born > last && (first < 0 || x.of.born < s.runs[first].of.born) {
				first = i
			}
		}
		if first < 0 {
			break
		}
		last = s.runs[first].of.born
		for _, x := range s.runs[first:] {
			if x.of.born != last {
				continue
			}
			if most -= x.pages.Len(); most < 0 && len(list) > 0 {
				break
			}
			list = append(list, x)
		}
		if most <= 0 {
			break
		}
	}
	slices.SortFunc(list, func(a, b flown) int { return int(a.pages.Start - b.pages.Start) })
	return list
}

// hold returns the parts of runs that lie in rg, and adds a use to the flight of each. whole reports whether they cover
// rg. With shown set, it returns none unless they cover rg and all are shown.
func (s *flights) hold(rg page.Range, shown bool) (parts []flown, whole bool) {
	if !s.any() || rg.Empty() {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	next := rg.Start
	first := s.firstLocked(rg.Start)
	for i := first; i < len(s.runs) && s.runs[i].pages.Overlaps(rg); i++ {
		x := &s.runs[i]
		if shown && (!x.shown || x.pages.Start > next) {
			return nil, false
		}
		if x.pages.Start <= next {
			next = x.pages.End
		}
	}
	if whole = next >= rg.End; shown && !whole {
		return nil, false
	}
	for i := first; i < len(s.runs) && s.runs[i].pages.Overlaps(rg); i++ {
		x := s.runs[i].part(s.runs[i].pages.Intersect(rg))
		x.of.users.Add(1)
		parts = append(parts, x)
	}
	return parts, whole
}

// dropParts ends the uses that hold added.
func dropParts(parts []flown) {
	for _, x := range parts {
		x.of.drop(1)
	}
}

// copyTo copies parts into p, which begins at byte off of the file.
func copyTo(p []byte, off int64, parts []flown) {
	for _, x := range parts {
		both := x.pages.Span().Intersect(page.Span(off, int64(len(p))))
		if !both.Empty() {
			copy(p[both.Off-off:both.End-off], x.bytes[both.Off-x.pages.Offset():])
		}
	}
}

// remove removes the pages of rg.
func (s *flights) remove(rg page.Range) {
	if !s.any() {
		return
	}
	s.mu.Lock()
	first := s.firstLocked(rg.Start)
	end := first
	var left []flown
	var gone []*flight
	for ; end < len(s.runs) && s.runs[end].pages.Overlaps(rg); end++ {
		x := s.runs[end]
		gone = append(gone, x.of)
		for _, rest := range page.Subtract([]page.Range{x.pages}, rg) {
			x.of.users.Add(1)
			left = append(left, x.part(rest))
		}
	}
	s.runs = slices.Replace(s.runs, first, end, left...)
	s.n.Store(int32(len(s.runs)))
	s.mu.Unlock()
	for _, x := range gone {
		x.drop(1)
	}
}

// put adds runs, which are ascending, and replaces runs that they overlap.
func (s *flights) put(runs []flown) {
	for _, x := range runs {
		s.remove(x.pages)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.firstLocked(runs[0].pages.Start)
	if i == len(s.runs) || s.runs[i].pages.Start >= runs[len(runs)-1].pages.End {
		s.runs = slices.Insert(s.runs, i, runs...)
	} else {
		s.runs = append(s.runs, runs...)
		slices.SortFunc(s.runs, func(a, b flown) int { return int(a.pages.Start - b.pages.Start) })
	}
	s.n.Store(int32(len(s.runs)))
}

// setShown shows or hides the runs that overlap rg.
func (s *flights) setShown(rg page.Range, shown bool) {
	if !s.any() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := s.firstLocked(rg.Start); i < len(s.runs) && s.runs[i].pages.Overlaps(rg); i++ {
		s.runs[i].shown = shown
	}
}

// overHome is a home with flights laid over it.
type overHome struct {
	mover.Home
	s *flights
}

// ReadAt implements mover.Home.
func (h overHome) ReadAt(p []byte, off int64) (n int, err error) {
	// Hold the flights before home is read: pages that land in between are then in both.
	parts, whole := h.s.hold(page.Covering(off, int64(len(p))), false)
	defer dropParts(parts)
	if n = len(p); !whole {
		if n, err = h.Home.ReadAt(p, off); err != nil {
			return n, err
		}
	}
	copyTo(p[:n], off, parts)
	return n, nil
}

// homeLocked returns home as this package reads it. It may be called by goroutines that the holder of File.mu waits
// for.
func (f *File) homeLocked() mover.Home {
	if !f.flights.any() {
		return f.home.Backing()
	}
	return overHome{f.home.Backing(), &f.flights}
}

// readFlying serves a read from shown flights, without File.mu.
func (f *File) readFlying(p []byte, off int64) (ok bool) {
	parts, ok := f.holdShown(p, off)
	if ok {
		f.readParts(p, off, parts)
	}
	return ok
}

// holdShown returns the argument for readParts if shown flights can serve the whole read.
func (f *File) holdShown(p []byte, off int64) (parts []flown, ok bool) {
	return f.flights.hold(page.Covering(off, int64(len(p))), true)
}

// readParts copies the parts that holdShown returned. It starts to bring more if the reader nears the end of its
// flights.
func (f *File) readParts(p []byte, off int64, parts []flown) {
	copyTo(p, off, parts)
	dropParts(parts)
	f.flights.used.Add(1)
	if f.asksForMore(page.Covering(off, int64(len(p)))) {
		f.landSoon()
	}
	f.count(func(c *Counters) { c.FlightReads.Add(1); c.FlightReadBytes.Add(int64(len(p))) })
}

// readOverLocked reads home with flights laid over it.
func (f *File) readOverLocked(p []byte, off int64) (n int, err error) {
	if n, err = f.homeLocked().ReadAt(p, off); err == nil {
		f.count(func(c *Counters) { c.FlightReads.Add(1); c.FlightReadBytes.Add(int64(n)) })
	}
	return n, err
}

// mostAloft returns how many bytes may fly.
func (c *Cache) mostAloft() int64 {
	return min(c.memory.limit/flightShare, page.Index(mostFlights).Offset())
}

// roomToFly reports whether n more bytes may fly.
func (c *Cache) roomToFly(n int64) bool {
	return c.memory.classes[memoryFlights].Load()+n <= c.mostAloft() && c.memory.fits(n)
}

// manyFly reports whether so many bytes fly that landing must not wait until reads pause.
func (c *Cache) manyFly() bool { return c.memory.classes[memoryFlights].Load() > c.mostAloft()/2 }

// flyLocked makes a fetched portion a flight, if that is allowed, instead of writing it home.
func (f *File) flyLocked(c *portion) bool {
	n := sizeOf(c.ranges)
	if c.ranges[len(c.ranges)-1].End.Offset() > f.home.Size() || f.backlog.err != nil || !f.c.roomToFly(n) {
		return false
	}
	f.flights.born++
	x := &flight{f: f, portion: c, bytes: n, born: f.flights.born}
	x.users.Store(int64(len(c.ranges)))
	f.c.memory.charge(memoryFlights, n)
	runs := make([]flown, len(c.ranges))
	for i, rg := range c.ranges {
		runs[i] = flown{pages: rg, bytes: c.merged[i], of: x}
	}
	f.flights.put(runs)
	f.count(func(c *Counters) { c.FlightPages.Add(n >> page.Shift) })
	f.landSoon()
	return true
}

// showLocked shows the flights of rg in which nothing is pending. Their pages then count as pages that the kernel may
// hold.
func (f *File) showLocked(rg page.Range) {
	if f.kernel.HasMerged() {
		return
	}
	for _, x := range f.flights.in(rg, math.MaxInt64) {
		if !x.shown && len(f.lrc.Pending(x.pages, true)) == 0 {
			f.lrc.CPURead(x.pages)
			f.flights.setShown(x.pages, true)
		}
	}
}

// landLocked brings home all flights of rg.
func (f *File) landLocked(rg page.Range) error {
	for f.flights.overlap(rg) {
		if err := f.landRunsLocked(f.flights.in(rg, collectPortion), math.MaxInt64); err != nil {
			return err
		}
	}
	return nil
}

// landSomeLocked brings home what the oldest flights have, wherever it is in the file: programs have probably read most
// of it. That is as much as home takes in a fraction of a millisecond, but at least one run.
func (f *File) landSomeLocked() error {
	return f.landRunsLocked(f.flights.oldest(home.ParallelSize>>page.Shift), home.WriteSize)
}

// landRunsLocked writes runs home. It may stop after limit bytes.
func (f *File) landRunsLocked(list []flown, limit int64) error {
	if len(list) == 0 {
		return nil
	}
	ranges, bufs := make([]page.Range, len(list)), make([][]byte, len(list))
	for i, x := range list {
		ranges[i], bufs[i] = x.pages, x.bytes
	}
	written, err := f.home.Write(ranges, bufs, false, limit)
	for _, rg := range joined(ranges) {
		f.spoilLocked(rg)
	}
	for _, rg := range joined(ranges[:written]) {
		f.flights.remove(rg)
	}
	if err != nil {
		f.failedLocked(err)
	} else if f.backlog.err != nil && !f.waitsLocked() {
		f.recoveredLocked()
	}
	return err
}

// cutFlightsLocked removes flights past size.
func (f *File) cutFlightsLocked(size int64) {
	if !f.flights.any() {
		return
	}
	last := page.Range{Start: page.Index(size >> page.Shift), End: page.Count(size)}
	for _, x := range f.flights.in(last, 1) { // the page at the end, whose rest is zero now
		of := &flight{f: f, portion: &portion{giveBack: func() {}}}
		of.users.Store(1)
		buf := slices.Clone(x.part(last).bytes)
		clear(buf[size-last.Offset():])
		f.flights.put([]flown{{pages: last, bytes: buf, of: of}})
	}
	f.flights.remove(page.Range{Start: page.Count(size), End: page.From(0).Pages().End})
}

// landUntilLocked waits for done, which must not need File.mu. Meanwhile it brings flights home.
func (f *File) landUntilLocked(done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		default:
		}
		if !f.flights.any() || f.backlog.err != nil || !f.c.manyFly() || f.landSomeLocked() != nil {
			<-done
			return
		}
	}
}

// landSoon makes the background bring flights home, and fetch what a program that reads in order will want next.
func (f *File) landSoon() { f.c.lanes.do(f, choreLand, f.land) }

func (f *File) land() {
	for f.landNext(false) {
	}
}

// landNext is one step of land, and reports whether there is more to do. Unless all is set, few flights wait until
// reads pause, as long as the file is mapped.
func (f *File) landNext(all bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return false
	}
	more := f.bringMoreLocked()
	switch {
	case !f.flights.any():
		f.dropIdleLocked()
		return more
	case !all && len(f.mappings) > 0 && !f.c.manyFly():
		f.landLaterLocked()
		return more
	}
	return f.landSomeLocked() == nil // errors are recorded, and it is tried again
}

// landLaterLocked brings flights home once reads pause.
func (f *File) landLaterLocked() {
	if f.landing != nil {
		return
	}
	f.c.background.Add(1)
	used := f.flights.used.Load()
	f.landing = time.AfterFunc(f.c.landPause, func() {
		defer f.c.background.Done()
		f.mu.Lock()
		f.landing = nil
		paused := f.flights.used.Load() == used
		if !paused && f.flights.any() {
			f.landLaterLocked()
		}
		if paused {
			f.forgetLeadsLocked()
		}
		f.mu.Unlock()
		for paused && f.landNext(true) {
		}
	})
}

// discardFlights drops all flights. Nobody needs their bytes any more.
func (f *File) discardFlights() {
	f.flights.remove(page.From(0).Pages())
	if f.landing != nil && f.landing.Stop() {
		f.c.background.Done()
		f.landing = nil
	}
}
