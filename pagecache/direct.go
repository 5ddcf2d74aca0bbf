package pagecache

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

// What the host's page cache lacks comes from the disk past it, for GPUs read more than it holds, and what programs on the CPU
// use would have to go. What it has is copied from there, also where a few of its pages lie between others: they, and not
// the disk, are what everybody else sees.
//
// Such reads go on without File.mu, which lets the disk work while CPU requests have their turn. They begin under File.mu; a
// change of home spoils those that it overlaps, and bytes are taken under File.mu from reads that are not spoiled. So what
// was read is what home has.
const (
	// directReads is how many pieces are read from the disk at once.
	directReads = 16
	// mixedRun is the smallest run that is looked at in halves where the host's page cache has some of it.
	mixedRun = 64 << 10
)

// ways counts the pages of home by the way that they came: from the host's page cache, from the disk past it, and from the
// disk through it.
type ways struct{ cached, direct, buffered int64 }

func (w *ways) add(o ways) {
	w.cached, w.direct, w.buffered = w.cached+o.cached, w.direct+o.direct, w.buffered+o.buffered
}

// homeReads are the reads of home that go on for one device without File.mu. Protected by File.mu; readers of one
// pipeline, whose caller holds that, take pipeline.mu besides.
type homeReads struct {
	users int // calls that will take what was read
	// under has them by their first pages.
	under map[page.Index]*homeRead
	// wait waits for what the last pipeline lacked; nil if that was nothing.
	wait func(ctx context.Context)
}

// pauseLocked returns what waits until an acquire can go on. It is to be called, without File.mu.
func (r *homeReads) pauseLocked() (wait func(ctx context.Context)) {
	if wait = r.wait; wait == nil {
		wait = func(context.Context) {}
	}
	r.wait = nil
	return wait
}

// homeRead is the read of a piece.
type homeRead struct {
	steps []page.Range
	// buf and release are as those of the piece, err says that there are none. Both are set when done is closed.
	buf     []byte
	release func()
	ways    ways
	err     error
	done    chan struct{}
	// fate is readGoesOn until the read ended or nobody wants it any more.
	fate atomic.Int32
	// spoiled says that home changed since. Protected as homeReads.
	spoiled bool
}

const (
	readGoesOn = iota
	readEnded
	readDropped
)

// enterReadsLocked lets reads for the device of h outlast holds of File.mu, until leave is called, with File.mu held.
func (f *File) enterReadsLocked(h *holding) (leave func()) {
	h.reads.users++
	return func() {
		if h.reads.users--; h.reads.users > 0 {
			return
		}
		for first := range h.reads.under {
			h.reads.drop(first)
		}
	}
}

// enterReads is enterReadsLocked for those who do not hold File.mu.
func (f *File) enterReads(h *holding) (leave func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	leaveLocked := f.enterReadsLocked(h)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		leaveLocked()
	}
}

// drop gives up a read that nobody will take.
func (r *homeReads) drop(first page.Index) {
	x := r.under[first]
	delete(r.under, first)
	if !x.fate.CompareAndSwap(readGoesOn, readDropped) {
		x.free()
	}
}

func (x *homeRead) free() {
	if x.err == nil {
		x.release()
	}
}

// spoilLocked says that home changed in rg.
func (f *File) spoilLocked(rg page.Range) {
	for _, h := range f.holdings {
		for _, x := range h.reads.under {
			x.spoiled = x.spoiled || slices.ContainsFunc(x.steps, rg.Overlaps)
		}
	}
}

// closeHomeLocked closes home when no read of it goes on.
func (f *File) closeHomeLocked(home Home) error {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	if f.reading > 0 {
		f.closing = append(f.closing, home)
		return nil
	}
	return home.Close()
}

// beginRead counts one more reader of home, or anybody else who uses it without File.mu, which is held. endRead takes it back.
func (f *File) beginRead() {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	f.reading++
}

func (f *File) endRead() {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	if f.reading--; f.reading > 0 {
		return
	}
	for _, home := range f.closing {
		if err := home.Close(); err != nil {
			f.c.log.Warn("closing the backing file", "error", err)
		}
	}
	f.closing = nil
}

// directLocked returns home if it may be read past the host's page cache.
func (f *File) directLocked() *directHome {
	home, ok := f.home.(DirectReader)
	if !ok || f.c.bufferedReads || f.noDirect.Load() {
		return nil
	}
	return &directHome{DirectReader: home, f: f, size: f.size}
}

// directHome reads home by what the host's page cache has of it.
type directHome struct {
	DirectReader
	f    *File
	size int64
}

// refused goes on after an error: where that is for good the file is not read so any more.
func (d *directHome) refused(err error) {
	var never *NoDirect
	if errors.As(err, &never) && !d.f.noDirect.Swap(true) {
		d.f.c.noDirect(never.Reason)
	}
}

// read reads pages, of which those past end of file are zeros.
func (d *directHome) read(p []byte, off int64) (w ways, err error) {
	all := int64(len(p)) >> page.Shift
	if most := page.Count(d.size).Offset() - off; int64(len(p)) > most {
		most = max(most, 0)
		clear(p[most:])
		p = p[:most]
	}
	err = d.readParts(p, off, &w)
	w.cached += all - w.cached - w.direct - w.buffered // what lies past end of file costs nothing
	return w, err
}

func (d *directHome) readParts(p []byte, off int64, w *ways) error {
	n := int64(len(p))
	if n == 0 {
		return nil
	}
	cached, err := d.Cached(off, n)
	switch {
	case err != nil:
		d.refused(err)
	case cached == 0:
		got, err := d.ReadDirect(p, off)
		if err == nil {
			clear(p[got:])
			w.direct += n >> page.Shift
			return nil
		}
		d.refused(err)
	case cached < n && n > mixedRun:
		half := page.Count(n / 2).Offset()
		if err := d.readParts(p[:half], off, w); err != nil {
			return err
		}
		return d.readParts(p[half:], off+half, w)
	case cached == n:
		got, err := d.ReadCached(p, off)
		if err != nil {
			return err
		}
		whole := int64(got) &^ (page.Size - 1)
		w.cached += whole >> page.Shift
		p, off = p[whole:], off+whole
	}
	return d.readBuffered(p, off, w)
}

// readBuffered reads pages as everybody does.
func (d *directHome) readBuffered(p []byte, off int64, w *ways) error {
	if len(p) == 0 {
		return nil
	}
	got, err := d.ReadAt(p, off)
	if err != nil {
		return err
	}
	clear(p[got:])
	w.buffered += int64(len(p)) >> page.Shift
	return nil
}

// warm reports whether the host's page cache seems to have all of a piece, of which it looks at three pages: looking at all of
// them takes some percent of the time that copying them does.
func (d *directHome) warm(x *piece) bool {
	n := len(x.steps)
	first, last := x.steps[0].pages, x.steps[n-1].pages
	middle := x.steps[n/2].pages
	end := page.Count(d.size)
	for k, i := range [...]page.Index{first.Start, last.End - 1, middle.Start + page.Index(middle.Len()/2)} {
		if i >= end || k > 0 && i == first.Start {
			continue
		}
		cached, err := d.Cached(i.Offset(), page.Size)
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

// readSteps reads the steps of a piece into buf, up to so many at once.
func (d *directHome) readSteps(steps []page.Range, buf []byte, atOnce int) (w ways, err error) {
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
			w.add(x)
			if err == nil {
				err = e
			}
		})
	}
	group.Wait()
	return w, err
}

// What is known of a piece in pipeline.warmth.
const (
	warmUnknown = iota
	warmYes
	warmNo
)

// isWarm is directHome.warm of piece i, which is asked once. It needs no lock.
func (p *pipeline) isWarm(i int) bool {
	if known := p.warmth[i].Load(); known != warmUnknown {
		return known == warmYes
	}
	warm := p.direct.warm(&p.pieces[i])
	if warm {
		p.warmth[i].Store(warmYes)
	} else {
		p.warmth[i].Store(warmNo)
	}
	return warm
}

// thereLocked reports whether piece i can be brought without waiting for the disk, where nobody should wait under File.mu. What
// cannot is read from now on, and what follows it.
func (p *pipeline) thereLocked(i int) bool {
	x := &p.pieces[i]
	r := p.h.reads.under[x.steps[0].pages.Start]
	switch {
	case x.held:
		return true
	case r != nil:
	case !p.cold.Load() && p.isWarm(i):
		return true
	}
	p.cold.Store(true)
	if r == nil && len(p.pieces) == 1 && !p.until.IsZero() {
		// A little for the only caller (who is counted twice, here and in acquire) takes less time than to come back for it.
		if x.bytes <= mixedRun && p.h.reads.users <= 2 {
			x.held = true
			return true
		}
		// Who waits may as well read.
		run := p.newReadLocked(x)
		p.lacks = func(context.Context) { run() }
		return false
	}
	p.readAheadLocked(i)
	r = p.h.reads.under[x.steps[0].pages.Start]
	if p.until.IsZero() || r.fate.Load() == readEnded {
		return true
	}
	p.lacks = r.wait
	return false
}

// readDirect reads a piece under File.mu by what the host's page cache has of it.
func (p *pipeline) readDirect(x *piece) (err error) {
	if x.buf, x.release, err = p.h.dev.HostBuffer(int(x.bytes)); err != nil {
		return err
	}
	if x.held {
		x.ways, err = p.direct.readSteps(x.ranges(), x.buf, directReads)
	} else {
		x.ways, err = p.direct.readWarm(x)
	}
	if err != nil {
		x.release()
	}
	return err
}

// readWarm reads a piece that the host's page cache seems to have.
func (d *directHome) readWarm(x *piece) (w ways, err error) {
	at := int64(0)
	for _, s := range x.steps {
		buf := x.buf[at : at+s.pages.Bytes()]
		at += s.pages.Bytes()
		n, err := d.ReadCached(buf, s.pages.Offset())
		if err != nil {
			return w, err
		}
		whole := int64(n) &^ (page.Size - 1)
		w.cached += whole >> page.Shift
		if whole < s.pages.Bytes() {
			rest, err := d.read(buf[whole:], s.pages.Offset()+whole)
			if w.add(rest); err != nil {
				return w, err
			}
		}
	}
	return w, nil
}

func (x *piece) ranges() []page.Range {
	ranges := make([]page.Range, len(x.steps))
	for i, s := range x.steps {
		ranges[i] = s.pages
	}
	return ranges
}

// takeRead returns the read of a piece that goes on already.
func (p *pipeline) takeRead(x *piece) *homeRead {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := x.steps[0].pages.Start
	r := p.h.reads.under[first]
	delete(p.h.reads.under, first)
	return r
}

// taken waits for a read and makes its buffer that of the piece.
func (p *pipeline) taken(x *piece, r *homeRead) error {
	<-r.done
	if r.err != nil {
		return r.err
	}
	x.buf, x.release, x.ways = r.buf, r.release, r.ways
	// What the host's page cache has is copied by the readers themselves.
	p.cold.Store(x.ways.direct+x.ways.buffered > 0)
	return nil
}

// readSpansLocked returns where reads for the device of h go on that part needs, and part with all of these: bytes of a read are
// taken together. Reads that cannot be taken are given up; spoiled is where home changed under some.
func (f *File) readSpansLocked(h *holding, part page.Range) (spans, spoiled []page.Range, wide page.Range) {
	wide = part
	for first, r := range h.reads.under {
		span := page.Range{Start: first, End: r.steps[len(r.steps)-1].End}
		if !span.Overlaps(part) {
			continue
		}
		// Outside of part nobody has brought home what devices released, and there may be no memory any more.
		inside := span.Intersect(part) == span
		if r.spoiled {
			spoiled = append(spoiled, span)
		}
		if r.spoiled || !inside && (len(f.lrc.Pending(span, true)) > 0 || !h.covers(span)) {
			h.reads.drop(first)
			continue
		}
		spans = append(spans, span)
	}
	slices.SortFunc(spans, func(a, b page.Range) int { return int(a.Start - b.Start) })
	kept := spans[:0]
	for _, s := range spans {
		if n := len(kept); n > 0 && s.Start < kept[n-1].End {
			h.reads.drop(s.Start)
			continue
		}
		kept = append(kept, s)
		wide.Start, wide.End = min(wide.Start, s.Start), max(wide.End, s.End)
	}
	return kept, spoiled, wide
}

// readAheadLocked begins to read piece i and those that follow.
func (p *pipeline) readAheadLocked(i int) {
	reads := &p.h.reads
	to := min(i+directReads, len(p.pieces))
	for k := max(p.advised, i); k < to; k++ {
		x := &p.pieces[k]
		first := x.steps[0].pages.Start
		if reads.under[first] != nil || x.held {
			continue
		}
		go p.newReadLocked(x)()
	}
	p.advised = max(p.advised, to)
}

// newReadLocked returns what reads a piece; it is to be called, and needs no lock.
func (p *pipeline) newReadLocked(x *piece) (run func()) {
	r := &homeRead{steps: x.ranges(), done: make(chan struct{})}
	reads := &p.h.reads
	if reads.under == nil {
		reads.under = make(map[page.Index]*homeRead)
	}
	reads.under[x.steps[0].pages.Start] = r
	f, dev, home, bytes, atOnce := p.f, p.h.dev, p.direct, x.bytes, max(1, directReads/len(p.pieces))
	f.beginRead()
	f.c.reads.Add(1)
	return func() { r.run(f, dev, home, bytes, atOnce) }
}

// wait waits for the end of the read.
func (r *homeRead) wait(ctx context.Context) {
	select {
	case <-r.done:
	case <-ctx.Done():
	}
}

// run carries out the read.
func (r *homeRead) run(f *File, dev *device, home *directHome, bytes int64, atOnce int) {
	defer f.c.reads.Done()
	defer f.endRead()
	r.read(dev, home, bytes, atOnce)
	if !r.fate.CompareAndSwap(readGoesOn, readEnded) {
		r.free()
	}
	close(r.done)
}

func (r *homeRead) read(dev *device, home *directHome, bytes int64, atOnce int) {
	if r.buf, r.release, r.err = dev.HostBuffer(int(bytes)); r.err != nil {
		return
	}
	if r.ways, r.err = home.readSteps(r.steps, r.buf, atOnce); r.err != nil {
		r.release()
	}
}

// forgetReadsLocked gives up reads of part that no piece will take. Pieces of what changed under a read are read under File.mu,
// lest somebody who writes all the time keeps them from being brought.
func (p *pipeline) forgetReadsLocked(part page.Range, spoiled []page.Range) {
	for i := range p.pieces {
		x := &p.pieces[i]
		all := page.Range{Start: x.steps[0].pages.Start, End: x.steps[len(x.steps)-1].pages.End}
		x.held = slices.ContainsFunc(spoiled, all.Overlaps)
	}
	reads := &p.h.reads
	for first, r := range reads.under {
		if first < part.Start || first >= part.End {
			continue
		}
		i, found := slices.BinarySearchFunc(p.pieces, first, func(x piece, first page.Index) int {
			return int(x.steps[0].pages.Start - first)
		})
		if !found || !slices.Equal(r.steps, p.pieces[i].ranges()) {
			reads.drop(first)
		}
	}
}

// noDirect says once why some file is read through the host's page cache.
func (c *Cache) noDirect(reason string) {
	c.mu.Lock()
	known := slices.Contains(c.noDirectReasons, reason)
	if !known {
		c.noDirectReasons = append(c.noDirectReasons, reason)
	}
	c.mu.Unlock()
	if !known {
		c.log.Info("devices read files through the host's page cache", "reason", reason)
	}
}

func (c *Cache) snapshotNoDirect() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string{}, c.noDirectReasons...)
}
