package mover

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Reads has the reads of home that run in the background for one device, so that nobody waits for the disk while
// holding what keeps home from being changed. They begin in a Fill. A change of home spoils the reads that it overlaps
// (Spoil), and Fills take only unspoiled reads. So the bytes that they take are what home has.
//
// The caller makes sure that methods of Reads run neither concurrently with each other nor during a Fill.
type Reads struct {
	users int // calls that will take reads
	// under has the reads by their first pages. Workers of a Fill also hold Fill.mu.
	under map[page.Index]*homeRead
	// wait waits for what the last Fill lacked; nil if it lacked nothing.
	wait func(ctx context.Context)
	// joined is set once a read went through the host's page cache. Workers of a Fill also hold Fill.mu.
	joined *ColdFile
}

// Pause returns a function that waits until a Fill can go on. Call it without holding what keeps home from being
// changed.
func (r *Reads) Pause() (wait func(ctx context.Context)) {
	if wait = r.wait; wait == nil {
		wait = func(context.Context) {}
	}
	r.wait = nil
	return wait
}

// Under returns how many reads are in progress or wait to be taken.
func (r *Reads) Under() int { return len(r.under) }

// homeRead is the read of a piece.
type homeRead struct {
	steps []page.Range
	// buf and giveBack are like those of a piece; err means that there are none. All are set before done is closed.
	buf      []byte
	giveBack func()
	ways     Ways
	err      error
	done     chan struct{}
	// round is nil for small reads. ours and behind are what ColdFile.enter returned. All are immutable.
	round  *round
	ours   bool
	behind page.Range
	// fate is readGoesOn until the read has ended or nobody wants it any more.
	fate atomic.Int32
	// spoiled means that home changed after the read began. Protected as Reads.
	spoiled bool
}

const (
	readGoesOn = iota
	readArrived
	readDropped
)

// Enter lets reads outlast Fills until Leave.
func (r *Reads) Enter() { r.users++ }

// Leave undoes Enter. The last one gives up all reads.
func (r *Reads) Leave() {
	if r.users--; r.users > 0 {
		return
	}
	for first := range r.under {
		r.drop(first)
	}
	if r.joined != nil {
		r.joined.leave()
		r.joined = nil
	}
}

// drop gives up a read that nobody will take.
func (r *Reads) drop(first page.Index) {
	x := r.under[first]
	delete(r.under, first)
	if !x.fate.CompareAndSwap(readGoesOn, readDropped) {
		x.free()
	}
}

func (x *homeRead) free() {
	if x.err == nil {
		x.giveBack()
	}
}

// Spoil notes that home changed in rg.
func (r *Reads) Spoil(rg page.Range) {
	for _, x := range r.under {
		x.spoiled = x.spoiled || slices.ContainsFunc(x.steps, rg.Overlaps)
	}
}

// The values of Fill.warmth.
const (
	warmUnknown = iota
	warmYes
	warmNo
)

// isWarm is Source.warm for piece i, computed once. It needs no lock.
func (p *Fill) isWarm(i int) bool {
	if known := p.warmth[i].Load(); known != warmUnknown {
		return known == warmYes
	}
	warm := p.From.warm(&p.Pieces[i])
	if warm {
		p.warmth[i].Store(warmYes)
	} else {
		p.warmth[i].Store(warmNo)
	}
	return warm
}

// thereLocked reports whether piece i can be brought now. Run with a deadline must not wait for the disk: if the piece
// would make it wait, thereLocked starts to read it and those that follow.
func (p *Fill) thereLocked(i int) bool {
	x := &p.Pieces[i]
	if p.claimed != nil {
		if c := p.claimed[i].Load(); c != nil {
			x = c
		}
		if len(x.Steps) == 0 {
			return true
		}
	}
	r := p.Reads.under[x.first()]
	switch {
	case x.held:
		return true
	case r != nil:
	case !p.cold.Load() && p.isWarm(i):
		return true
	}
	p.cold.Store(true)
	if r == nil && len(p.Pieces) == 1 && !p.Until.IsZero() {
		// If there is only one caller (which counts twice, here and in acquire), reading a little takes less time than
		// coming back for it.
		if x.bytes <= MixedRun && p.Reads.users <= 2 {
			x.held = true
			return true
		}
		// The caller, which has to wait anyway, reads it then.
		run := p.newReadLocked(x)
		p.lacks = func(context.Context) { run() }
		return false
	}
	p.readAheadLocked(i)
	if p.Until.IsZero() {
		return true
	}
	if r = p.Reads.under[x.first()]; r.fate.Load() == readArrived {
		return true
	}
	p.lacks = r.wait
	return false
}

// readDirect reads a piece, partly from the host's page cache.
func (p *Fill) readDirect(x *Piece) (err error) {
	if x.buf, x.giveBack, err = p.Device.dev.HostBuffer(int(x.bytes)); err != nil {
		return err
	}
	if x.held {
		x.Ways, err = p.From.readSteps(x.ranges(), x.buf, DirectReads)
	} else {
		x.Ways, err = p.From.readWarm(x)
	}
	if err != nil {
		x.giveBack()
	}
	return err
}

// readWarm reads a piece that the host's page cache seems to have.
func (d *Source) readWarm(x *Piece) (w Ways, err error) {
	at := int64(0)
	for _, s := range x.Steps {
		buf := x.buf[at : at+s.Pages.Bytes()]
		at += s.Pages.Bytes()
		n, err := d.Direct.ReadCached(buf, s.Pages.Offset())
		if err != nil {
			return w, err
		}
		whole := int64(n) &^ (page.Size - 1)
		w.Cached += whole >> page.Shift
		if whole < s.Pages.Bytes() {
			rest, err := d.read(buf[whole:], s.Pages.Offset()+whole)
			if w.Add(rest); err != nil {
				return w, err
			}
		}
	}
	return w, nil
}

func (x *Piece) ranges() []page.Range {
	ranges := make([]page.Range, len(x.Steps))
	for i, s := range x.Steps {
		ranges[i] = s.Pages
	}
	return ranges
}

// takeRead takes the background read of a piece, or returns nil.
func (p *Fill) takeRead(x *Piece) *homeRead {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := x.first()
	r := p.Reads.under[first]
	delete(p.Reads.under, first)
	return r
}

// taken waits for a read, and gives its buffer to the piece.
func (p *Fill) taken(x *Piece, r *homeRead) error {
	<-r.done
	if r.err != nil {
		return r.err
	}
	x.buf, x.giveBack, x.Ways = r.buf, r.giveBack, r.ways
	// If the bytes came from the host's page cache, readers copy the next pieces themselves.
	p.cold.Store(x.Ways.Direct+x.Ways.Buffered > 0)
	return nil
}

// Spans returns the spans of reads that part needs, and part extended to include all of them, because a read is only
// taken as a whole. It gives up reads that are spoiled or overlap others, and reads that reach outside part and are not
// usable. spoiled lists the spans of spoiled reads.
func (r *Reads) Spans(part page.Range, usable func(span page.Range) bool) (
	spans, spoiled []page.Range, wide page.Range,
) {
	wide = part
	for first, x := range r.under {
		span := page.Range{Start: first, End: x.steps[len(x.steps)-1].End}
		if !span.Overlaps(part) {
			continue
		}
		inside := span.Intersect(part) == span
		if x.spoiled {
			spoiled = append(spoiled, span)
		}
		if x.spoiled || !inside && !usable(span) {
			r.drop(first)
			continue
		}
		spans = append(spans, span)
	}
	slices.SortFunc(spans, func(a, b page.Range) int { return int(a.Start - b.Start) })
	kept := spans[:0]
	for _, s := range spans {
		if n := len(kept); n > 0 && s.Start < kept[n-1].End {
			r.drop(s.Start)
			continue
		}
		kept = append(kept, s)
		wide.Start, wide.End = min(wide.Start, s.Start), max(wide.End, s.End)
	}
	return kept, spoiled, wide
}

// leastAhead is how many pieces of a Fill are read from the disk at once, at least, if several Fills share DirectReads.
const leastAhead = 4

// readAheadLocked starts to read piece i and those that follow.
func (p *Fill) readAheadLocked(i int) {
	reads := p.Reads
	to := min(i+max(DirectReads/p.Device.sharers(), leastAhead), len(p.Pieces))
	for k := max(p.advised, i); k < to; k++ {
		x := p.piece(k)
		if len(x.Steps) == 0 || reads.under[x.first()] != nil || x.held {
			continue
		}
		go p.newReadLocked(x)()
	}
	p.advised = max(p.advised, to)
}

// newReadLocked returns a function that reads a piece. The caller must call it; it needs no lock.
func (p *Fill) newReadLocked(x *Piece) (run func()) {
	r := &homeRead{steps: x.ranges(), done: make(chan struct{})}
	reads := p.Reads
	if reads.under == nil {
		reads.under = make(map[page.Index]*homeRead)
	}
	reads.under[x.first()] = r
	if cold := p.From.Cold; cold != nil && len(r.steps) == 1 && x.bytes >= LeastPiece {
		r.round = cold.way.begin(x.bytes, time.Now())
		if r.round.through && reads.joined == nil {
			reads.joined = cold
			cold.join(p.hold)
		}
		r.ours, r.behind = cold.enter(p.From, r.steps[0])
	}
	p.hold.users.Add(1)
	dev, home, bytes, atOnce := p.Device, p.hold, x.bytes, max(1, DirectReads/len(p.Pieces))
	return func() { r.run(dev, home, bytes, atOnce) }
}

// wait waits for the end of the read, or of ctx.
func (r *homeRead) wait(ctx context.Context) {
	select {
	case <-r.done:
	case <-ctx.Done():
	}
}

// run carries out the read.
func (r *homeRead) run(dev *Device, home *hold, bytes int64, atOnce int) {
	defer home.drop()
	defer home.from.report()
	r.read(dev, home.from, bytes, atOnce)
	if !r.fate.CompareAndSwap(readGoesOn, readArrived) {
		r.free()
	}
	close(r.done)
	home.from.drop(r.behind)
}

func (r *homeRead) read(dev *Device, home *Source, bytes int64, atOnce int) {
	if r.round != nil {
		defer func() { home.Cold.way.end(r.round, time.Now(), r.err) }()
	}
	if r.buf, r.giveBack, r.err = dev.dev.HostBuffer(int(bytes)); r.err != nil {
		return
	}
	switch {
	case !r.ours:
		r.ways, r.err = home.readSteps(r.steps, r.buf, atOnce)
	case r.round.through:
		r.ways, r.err = home.readThrough(r.buf, r.steps[0].Offset())
	default:
		home.drop(r.steps[0]) // what the kernel has read ahead
		r.ways, r.err = home.read(r.buf, r.steps[0].Offset())
	}
	if r.err != nil {
		r.giveBack()
	}
}

// Forget gives up reads of part that no piece will take. It is called before Run. Pieces that changed under a read are
// read by Run itself; otherwise a program that keeps writing could starve them.
func (p *Fill) Forget(part page.Range, spoiled []page.Range) {
	for i := range p.Pieces {
		x := &p.Pieces[i]
		all := page.Range{Start: x.first(), End: x.Steps[len(x.Steps)-1].Pages.End}
		x.held = slices.ContainsFunc(spoiled, all.Overlaps)
	}
	reads := p.Reads
	for first, r := range reads.under {
		if first < part.Start || first >= part.End {
			continue
		}
		i, found := slices.BinarySearchFunc(p.Pieces, first, func(x Piece, first page.Index) int {
			return int(x.first() - first)
		})
		if !found || !slices.Equal(r.steps, p.Pieces[i].ranges()) {
			reads.drop(first)
		}
	}
}
