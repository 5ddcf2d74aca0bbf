package pagecache

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Bytes go from home to a device through a pipeline. Workers read pieces from home into buffers that the device copies
// fastest from, several at once, since one core copies from the host's page cache at a fraction of what a bus takes. Whoever
// finds enough of it read gives it to the device himself: to wake somebody for that may take longer than the copy. Two do
// so at a time, so that the bus always has something to carry.
const (

	// pieceBytes is the most that is read into one buffer: enough for the bus to be efficient, and small enough for a few
	// buffers to stay in the processor's cache between the read and the copy. Where there is little to bring, pieces are
	// smaller, so that every reader has some, but not smaller than leastPiece.
	pieceBytes = 2 << 20
	leastPiece = 256 << 10
	// pieceRuns is the most runs of a piece. Scattered pages are a call each, and are to be spread over the readers.
	pieceRuns = 32
	// callBytes is what one call gives to the device at most, a piece more or less. A call costs tens of microseconds however
	// little it is about, so nobody begins one for less than mostLeastCall while there is more to read; where there is little in
	// all, for less than leastCall, since the last call is waited for when all else is done.
	callBytes     = 16 << 20
	mostLeastCall = 4 << 20
	leastCall     = 1 << 20
	// fewCalls is about the most calls that are smaller than mostLeastCall.
	fewCalls   = 6
	senders    = 2
	maxReaders = 12
	// aheadPieces is how far before the readers a file that is not in the host's page cache is asked for.
	aheadPieces = 16
)

// readers is the number of goroutines that read from home. Some cores are left to those who copy and to programs.
func readers() int { return min(max(2, runtime.GOMAXPROCS(0)*3/4), maxReaders) }

// step is a run of pages to be brought from home.
type step struct {
	pages page.Range
	base  lrc.Base
	mode  lrc.Mode
	// storing says that programs may be storing into the pages.
	storing bool
}

// hashed reports whether the host takes the digests, from the very bytes that are copied. Where no program can be storing
// the device takes them later, from its copy.
func (s *step) hashed() bool { return s.storing || s.mode == lrc.ModePatch }

// piece is what is read into one buffer.
type piece struct {
	steps []step
	bytes int64

	// buf holds the steps' bytes one after the other, between read and send. release gives it back.
	buf     []byte
	release func()
	// sums has the digests of the steps that are hashed, one after the other, copies what brings the steps that are not patched
	// up to date, patches the others. They are made along with the read, by those who read at once, and the digests while the
	// bytes are in the processor's cache.
	sums    []gpubackend.Digest
	copies  []gpubackend.Copy
	patches []gpubackend.Patch
	ways    ways
	// held says that home is read under File.mu, for it changed when it was not.
	held bool
	// done says that the device has the bytes.
	done bool
}

// pieceFor returns the most bytes of a piece of updates.
func pieceFor(stale []lrc.Update) int64 {
	total := int64(0)
	for _, u := range stale {
		total += u.Range.Bytes()
	}
	return min(max(total/int64(2*readers()), leastPiece), pieceBytes) &^ (page.Size - 1)
}

// piecesOf cuts updates into pieces of at most so many bytes, by what programs may be storing into. What lies in one of spans
// is a piece of its own. All are ascending.
func piecesOf(stale []lrc.Update, storing []tracking, most int64, spans []page.Range) (pieces []piece) {
	var within page.Range // the span of the last piece
	// The pieces share one array of steps, of which each has its part in the end.
	steps := make([]step, 0, len(stale)+len(storing)+len(spans))
	pieces = make([]piece, 0, len(stale)/pieceRuns+len(storing)+2*len(spans)+2)
	count := 0 // of the last piece
	seal := func() {
		if n := len(pieces); n > 0 {
			pieces[n-1].steps = steps[len(steps)-count : len(steps) : len(steps)]
		}
	}
	add := func(s step, span page.Range) {
		if n := len(pieces); n > 0 && span == within && count < pieceRuns &&
			(pieces[n-1].bytes+s.pages.Bytes() <= most || !span.Empty()) {
			pieces[n-1].bytes += s.pages.Bytes()
			steps, count = append(steps, s), count+1
			return
		}
		seal()
		within = span
		steps, count = append(steps, s), 1
		pieces = append(pieces, piece{bytes: s.pages.Bytes()})
	}
	defer seal()
	k := 0
	for _, u := range stale {
		for at := u.Range.Start; at < u.Range.End; {
			for storing[k].pages.End <= at {
				k++
			}
			for len(spans) > 0 && spans[0].End <= at {
				spans = spans[1:]
			}
			var span page.Range
			end := min(u.Range.End, storing[k].pages.End)
			switch {
			case len(spans) > 0 && spans[0].Start <= at:
				span = spans[0]
				end = min(end, span.End)
			case len(spans) > 0:
				end = min(end, spans[0].Start, at+page.Index(most>>page.Shift))
			default:
				end = min(end, at+page.Index(most>>page.Shift))
			}
			add(step{page.Range{Start: at, End: end}, u.Base, u.Mode, storing[k].track}, span)
			at = end
		}
	}
	return pieces
}

// pipeline brings pieces of one file to one device, on behalf of a caller who holds File.mu and waits.
type pipeline struct {
	f      *File
	h      *holding
	plan   lrc.AcquirePlan
	ctx    context.Context
	class  mover.Class
	until  time.Time // zero if all must be brought now
	pieces []piece
	direct *directHome // nil where home is read through the host's page cache
	// warmth has what isWarm found of each piece; nil where nobody asks.
	warmth []atomic.Int32
	// workers read, and nobody begins a call for less than leastCall bytes while there is more to read. Immutable once run began.
	workers   int
	leastCall int64

	slots chan struct{} // one for each buffer in use
	cold  atomic.Bool

	// settling is what pieces that the device has come to, while others are read.
	settling settling

	mu      sync.Mutex
	next    int           // protected by mu; pieces that workers took
	advised int           // protected by mu; pieces that were asked for ahead
	err     error         // protected by mu; the first
	ready   []*piece      // protected by mu; read, and nobody is sending them
	waiting int64         // protected by mu; bytes of ready
	sending int           // protected by mu; workers that are sending
	busy    int           // protected by mu; workers that have a piece, or are sending
	ended   bool          // protected by mu; nobody begins anything any more
	idle    chan struct{} // closed when ended is true and busy is 0
	// lacks waits for the piece for which the pipeline has ended, nil if it has not for one. Protected by mu.
	lacks func(ctx context.Context)
}

// fromHomeLocked brings the updates of part, which are stale, from home, and returns how many pages and up to which page
// it came. storing covers part. called are readers that may take part, nil if there are none yet.
func (f *File) fromHomeLocked(ctx context.Context, h *holding, part page.Range, stale []lrc.Update, storing []tracking, until time.Time, called *crew, plan *lrc.AcquirePlan) (
	pages int64, next page.Index, err error,
) {
	if len(stale) == 0 {
		return 0, part.End, nil
	}
	defer f.enterReadsLocked(h)()
	spans, spoiled, wide := f.readSpansLocked(h, part)
	if wide != part {
		plan.Widen(wide)
		stale = plan.Updates()
		storing = f.storingLocked(h, wide)
	}
	p := &pipeline{
		f: f, h: h, plan: *plan, ctx: ctx, class: mover.Acquire, until: until, direct: f.directLocked(),
	}
	p.cold.Store(len(spans) > 0)
	if slices.ContainsFunc(storing, func(t tracking) bool { return t.track }) ||
		slices.ContainsFunc(stale, func(u lrc.Update) bool { return u.Mode == lrc.ModePatch }) {
		// From now on digests change one by one, each by whoever brings its page.
		h.agreeOn(stale)
	}
	p.pieces = piecesOf(stale, storing, pieceFor(stale), spans)
	if p.direct != nil {
		p.warmth = make([]atomic.Int32, len(p.pieces))
	}
	p.forgetReadsLocked(wide, spoiled)
	p.mu.Lock()
	over := p.overLocked()
	p.mu.Unlock()
	switch {
	case over:
	case len(p.pieces) == 1:
		p.alone()
	default:
		p.run(called)
	}
	h.reads.wait = p.lacks
	if p.err != nil {
		h.litter([]page.Range{wide})
	}
	// After an error pieces may be there that come after one that is not.
	next = part.End
	fills, filled := int64(0), page.Range{}
	for i := range p.pieces {
		x := &p.pieces[i]
		if !x.done {
			next = min(next, max(x.steps[0].pages.Start, part.Start))
			continue
		}
		for k := range x.steps {
			s := &x.steps[k]
			pages += s.pages.Intersect(part).Len()
			if s.mode == lrc.ModeFill {
				if filled.End != s.pages.Start {
					fills++
				}
				filled = s.pages
			}
		}
	}
	p.settling.endLocked(f, fills)
	return pages, next, p.err
}

// alone brings the only piece, without anybody's help.
func (p *pipeline) alone() {
	p.next = 1
	x := &p.pieces[0]
	err := p.read(0, x)
	if err == nil {
		err = p.send([]*piece{x})
	}
	if err != nil {
		p.fail(err)
		return
	}
	p.settle([]*piece{x})
}

// run brings pieces until all are there, the time is over, or something failed, and returns when nothing is under way. The
// caller does its part: goroutines take time to be woken. Those that come too late find nothing to do and are not
// waited for.
func (p *pipeline) run(called *crew) {
	n := min(readers(), len(p.pieces))
	largest, total := int64(0), int64(0)
	for i := range p.pieces {
		largest, total = max(largest, p.pieces[i].bytes), total+p.pieces[i].bytes
	}
	p.workers, p.leastCall = n, min(max(total/fewCalls, leastCall), mostLeastCall)
	buffers := min(int64(n*pieceBytes+senders*callBytes)/largest, int64(len(p.pieces)))
	p.slots = make(chan struct{}, buffers)
	p.idle = make(chan struct{})
	if called == nil {
		called = callCrew()
	}
	called.begin(p, n-1)
	p.work()
	p.mu.Lock()
	p.ended = true
	if p.busy == 0 {
		close(p.idle)
	}
	p.mu.Unlock()
	spinOn(p.idle)
}

// work reads pieces while there are some to be read, and sends.
func (p *pipeline) work() {
	for {
		p.slots <- struct{}{}
		i, ok := p.take()
		if !ok {
			<-p.slots
			return
		}
		if ahead := i + p.workers; p.direct != nil && ahead < len(p.pieces) && !p.cold.Load() {
			p.isWarm(ahead) // not when it is its turn, which is with mu held
		}
		x := &p.pieces[i]
		if err := p.read(i, x); err != nil {
			p.fail(err)
			<-p.slots
			x = nil
		}
		p.pass(x)
	}
}

// take gives a worker its next piece. Pieces are taken in order, so those that were are a prefix. Where there is none, the worker
// sends what others left.
func (p *pipeline) take() (i int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return 0, false
	}
	p.busy++
	if p.overLocked() {
		p.sendLocked()
		p.restLocked()
		return 0, false
	}
	p.next++
	return p.next - 1, true
}

// overLocked reports whether no more pieces are to be taken. Once it is so it stays so.
func (p *pipeline) overLocked() bool {
	if p.err == nil {
		p.err = p.ctx.Err()
	}
	return p.err != nil || p.next == len(p.pieces) || p.next > 0 && !p.until.IsZero() && time.Now().After(p.until) ||
		p.lacks != nil || p.direct != nil && !p.thereLocked(p.next)
}

// pass is called by a worker with the piece that it has read, or nil, and sends if it is time.
func (p *pipeline) pass(x *piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if x != nil {
		p.ready, p.waiting = append(p.ready, x), p.waiting+x.bytes
	}
	// Without a free buffer nobody reads on until somebody sends.
	if p.waiting >= p.leastCall || len(p.slots) == cap(p.slots) || p.overLocked() {
		p.sendLocked()
	}
	p.restLocked()
}

// restLocked has a worker be busy no more.
func (p *pipeline) restLocked() {
	if p.busy--; p.busy == 0 && p.ended {
		close(p.idle)
	}
}

// sendLocked sends what was read until nothing is left, unless enough others do so. It lets go of mu meanwhile.
func (p *pipeline) sendLocked() {
	if p.sending == senders {
		return
	}
	p.sending++
	var sent []*piece
	for len(p.ready) > 0 {
		n, size := 0, int64(0)
		for ; n < len(p.ready) && size < callBytes; n++ {
			size += p.ready[n].bytes
		}
		call := p.ready[:n:n]
		p.ready, p.waiting = p.ready[n:], p.waiting-size
		p.mu.Unlock()
		err := p.send(call)
		if err != nil {
			p.fail(err)
		} else {
			sent = append(sent, call...)
		}
		for range call {
			<-p.slots
		}
		p.mu.Lock()
	}
	p.sending--
	if len(sent) > 0 {
		p.mu.Unlock() // others may send meanwhile
		p.settle(sent)
		p.mu.Lock()
	}
}

func (p *pipeline) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}

// read reads a piece from home and makes its digests and patches. After an error it has no buffer.
func (p *pipeline) read(i int, x *piece) (err error) {
	if p.direct == nil {
		err = p.readBuffered(i, x)
	} else if r := p.takeRead(x); r != nil {
		err = p.taken(x, r)
	} else {
		err = p.readDirect(x)
	}
	if err != nil {
		return err
	}
	return p.prepare(x)
}

// prepare makes what is given to the device of a piece that was read, and its digests. After an error it has no buffer.
func (p *pipeline) prepare(x *piece) error {
	var hashed, patched int64
	for k := range x.steps {
		switch s := &x.steps[k]; {
		case s.mode == lrc.ModePatch:
			patched += s.pages.Len()
			hashed += s.pages.Len()
		case s.storing:
			hashed += s.pages.Len()
		}
	}
	if hashed > 0 {
		x.sums = make([]gpubackend.Digest, hashed)
	}
	if patched > 0 {
		x.patches = make([]gpubackend.Patch, 0, patched)
	}
	if patched < x.bytes>>page.Shift {
		x.copies = make([]gpubackend.Copy, 0, len(x.steps))
	}
	at, sums, of := int64(0), x.sums, walk{h: p.h}
	for k := range x.steps {
		s := &x.steps[k]
		buf := x.buf[at : at+s.pages.Bytes()]
		at += s.pages.Bytes()
		var own []gpubackend.Digest
		if s.hashed() {
			own, sums = sums[:s.pages.Len()], sums[s.pages.Len():]
			p.h.dev.Key().SumPages(buf, own)
		}
		if s.mode != lrc.ModePatch {
			x.copies = of.appendCopies(x.copies, s.pages, buf)
			continue
		}
		var err error
		if x.patches, err = p.f.appendPatchesLocked(x.patches, &of, s.pages, s.base, buf, own); err != nil {
			x.release()
			return err
		}
	}
	return nil
}

// readBuffered reads a piece through the host's page cache.
func (p *pipeline) readBuffered(i int, x *piece) (err error) {
	if x.buf, x.release, err = p.h.dev.HostBuffer(int(x.bytes)); err != nil {
		return err
	}
	at := int64(0)
	for k := range x.steps {
		s := &x.steps[k]
		if err := p.readStep(i, s, x.buf[at:at+s.pages.Bytes()], &x.ways); err != nil {
			x.release()
			return err
		}
		at += s.pages.Bytes()
	}
	return nil
}

// readStep reads one run, and sees to it that what follows is on its way where home has to be waited for.
func (p *pipeline) readStep(i int, s *step, buf []byte, w *ways) error {
	home, ok := p.f.home.(HostCached)
	if !ok {
		w.buffered += s.pages.Len()
		return p.f.readHomeLocked(s.pages, buf)
	}
	n := 0
	if !p.cold.Load() || s.pages.Len() == 1 {
		var err error
		if n, err = home.ReadCached(buf, s.pages.Offset()); err != nil {
			return err
		}
		w.cached += int64(n) >> page.Shift
		if n == len(buf) {
			return nil
		}
	}
	w.buffered += (int64(len(buf)-n) + page.Size - 1) >> page.Shift
	p.cold.Store(true)
	p.askAhead(i, home)
	m, err := home.ReadAt(buf[n:], s.pages.Offset()+int64(n))
	if err != nil {
		return err
	}
	clear(buf[n+m:])
	return nil
}

// askAhead asks for the piece that is being read and for a few that follow. The distance grows with every piece, up to
// aheadPieces, and outlasts the hold: what was asked for arrives while CPU requests have their turn.
func (p *pipeline) askAhead(i int, home HostCached) {
	p.mu.Lock()
	from := max(p.advised, i)
	to := min(max(from+2, i+1), i+aheadPieces, len(p.pieces))
	p.advised = max(p.advised, to)
	p.mu.Unlock()
	for k := from; k < to; k++ {
		for _, s := range p.pieces[k].steps {
			home.WillNeed(s.pages.Offset(), s.pages.Bytes())
		}
	}
}

// callList is what one call gives to the device. Of scattered pages it is long, and its memory goes round.
type callList struct {
	copies  []gpubackend.Copy
	patches []gpubackend.Patch
}

var callLists = sync.Pool{New: func() any { return new(callList) }}

// done gives the list back, empty.
func (l *callList) done() {
	clear(l.copies)
	clear(l.patches)
	l.copies, l.patches = l.copies[:0], l.patches[:0]
	callLists.Put(l)
}

// send gives pieces that were read to the device, and their buffers back.
func (p *pipeline) send(pieces []*piece) error {
	defer func() {
		for _, x := range pieces {
			x.release()
			x.buf, x.copies, x.patches = nil, nil, nil
		}
	}()
	copies, patches := pieces[0].copies, pieces[0].patches
	if len(pieces) > 1 {
		all := callLists.Get().(*callList)
		defer all.done()
		for _, x := range pieces {
			all.copies, all.patches = append(all.copies, x.copies...), append(all.patches, x.patches...)
		}
		copies, patches = all.copies, all.patches
	}
	if len(copies) > 0 {
		if err := p.h.dev.moves.In(p.ctx, p.class, copies); err != nil {
			return err
		}
	}
	if len(patches) > 0 {
		// A page that is patched and not said to be would be compared with the older base, and home's bytes be taken for
		// the device's: a patch that is begun is carried through.
		if err := p.h.dev.moves.Patch(context.WithoutCancel(p.ctx), p.class, patches); err != nil {
			return err
		}
	}
	return nil
}
