package mover

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/mapped"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Bytes go from home to a device through a pipeline. Several workers read pieces from home at once, into buffers that
// the device copies fastest from, because one core copies from the host's page cache at a fraction of a bus's speed. A
// worker that finds enough of it read gives it to the device itself: waking another goroutine may take longer than the
// copy. Two workers send at a time, so that the bus is always busy.
const (

	// PieceBytes is the most that is read into one buffer: enough for the bus to be efficient, and small enough for a
	// few buffers to stay in the processor's cache between the read and the copy. If there is little to bring, pieces
	// are smaller, so that every reader has some, but not below LeastPiece.
	PieceBytes = 2 << 20
	LeastPiece = 256 << 10
	// PieceRuns is the most runs of a piece. Each scattered page is a read call, and they should be spread over the
	// readers.
	PieceRuns = 32
	// callBytes is about the most that one call gives to the device. A call costs tens of microseconds however small it
	// is. So no call is smaller than mostLeastCall while there is more to read. If there is little in all, the limit
	// sinks to leastCall, because the last call is waited for when all else is done.
	callBytes     = 16 << 20
	mostLeastCall = 4 << 20
	leastCall     = 1 << 20
	// fewCalls is about the largest number of calls smaller than mostLeastCall.
	fewCalls   = 6
	senders    = 2
	MaxReaders = 12
	// aheadPieces is how far ahead of the readers the host is asked for a file that is not in its page cache.
	aheadPieces = 16
)

// Readers is the number of goroutines that read from home for one link.
func Readers() int { return min(max(2, readingCores()), MaxReaders) }

// readingCores is how many cores may read from home. It leaves some to copies and to programs.
func readingCores() int { return runtime.GOMAXPROCS(0) * 3 / 4 }

// goroutinesLocked is how many goroutines work for the Fill, next to other Fills of its device.
func (p *Fill) goroutinesLocked() int {
	return goroutinesWith(goroutinesOf(p.Device.sharers()), p.relaysLocked())
}

// goroutinesWith is how many goroutines work for a Fill with so many relays. own of them work for its own link: some
// send, and the others read. If more than readingCores worked, they would take turns on the cores, and what they read
// would leave a core's cache before the device copies it. Each relay's link wants as many as the own link, and one more
// that waits for it.
func goroutinesWith(own, relays int) int {
	return max(own, min(own*(1+relays), readingCores())) + relays
}

// buffered is how many bytes of buffers a Fill of large pieces uses.
func buffered(goroutines, relays int) int { return goroutines*PieceBytes + (senders+relays)*callBytes }

// goroutinesOf is how many goroutines work for the own link of one of n Fills.
func goroutinesOf(n int) int { return min((Readers()-senders+n-1)/n+senders, Readers()) }

// sharers is how many Fills bring bytes to the device, at least one.
func (d *Device) sharers() int { return max(1, int(d.fills.Load())) }

// Target says where the bytes of a Fill go. Its methods are called from several goroutines at once, without locks of
// this package, until Run returns.
type Target interface {
	// Placer returns a Placer for one goroutine and one piece.
	Placer() Placer
	// Sent reports pieces as soon as the device has them. The sender waits for it, so it should be quick.
	Sent(pieces []*Piece)
	// Arrived reports pieces that the device has, ascending, while others are being read. Each piece is reported once.
	Arrived(pieces []*Piece)
}

// Placer knows where pages are in device memory.
type Placer interface {
	// AppendCopies appends the copies that bring buf to pages.
	AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy
	// AppendPatches appends the patches that update the pages of s. home is their content, with the digests sums.
	AppendPatches(list []gpubackend.Patch, s *Step, home []byte, sums []gpubackend.Digest) ([]gpubackend.Patch, error)
}

// Fill brings pieces of one file from home to one device. A caller waits for it in Run. Until Run has returned, the
// caller prevents changes to home, to the places of the pages, and to Reads. The exported fields are set before Run.
type Fill struct {
	Device *Device
	Class  Class
	From   *Source
	Into   Target
	Pieces []Piece
	// Ready makes the device's memory ready for copies. It is called before each call that makes them, and may wait.
	// nil if the memory is ready.
	Ready func(ctx context.Context, copies []gpubackend.Copy) error
	// Until, if not zero, is when no more pieces begin, except the first. If home can be read past the host's page
	// cache, Run then does not wait for the disk, either: pieces are read ahead, and Reads.Pause waits for what is
	// missing.
	Until time.Time
	// Reads has the reads that outlast Run; nil if From is not Direct.
	Reads *Reads
	// Relays has what the Fill may use besides the device's own link. Relays in use are not in it.
	Relays []*Relay
	// Cold means not to look for home in the host's page cache first.
	Cold bool

	ctx context.Context
	// warmth has isWarm's result for each piece; nil if From is not Direct.
	warmth []atomic.Int32
	// hold keeps home open for reads that outlast Run.
	hold *hold
	// workers is about how many goroutines read. Calls have at least leastCall bytes while there is more to read.
	// Immutable once run began.
	workers   int
	leastCall int64

	slots chan struct{} // one for each buffer in use
	cold  atomic.Bool

	inbox inbox // what other Fills read for this one
	// began is when Run began; immutable since. paced is how long workers have waited for other Fills, in nanoseconds.
	began time.Time
	paced atomic.Int64

	// claimed has the pieces as claimed, if Into is a Sharer. Those that are not claimed yet are nil.
	claimed []atomic.Pointer[Piece]
	// claimMu is mostly taken without mu, so that nobody who brings a share waits for other Fills' claims.
	claimMu sync.Mutex
	claims  int // how many pieces are claimed; protected by claimMu

	mu      sync.Mutex
	readers int           // protected by mu; workers that have not left, including the caller
	next    int           // protected by mu; number of pieces taken by workers
	advised int           // protected by mu; number of pieces asked for ahead
	err     error         // protected by mu; the first error
	ready   []*Piece      // protected by mu; read, but not yet being sent
	waiting int64         // protected by mu; bytes of ready
	sending int           // protected by mu; workers sending over the own link
	speed   float64       // protected by mu; of the last large call over the own link, in bytes per second
	busy    int           // protected by mu; workers that have a piece or are sending
	ended   bool          // protected by mu; nothing more begins
	idle    chan struct{} // closed when ended is true and busy is 0
	// lacks waits for the missing piece at which the pipeline ended; nil if it did not. Protected by mu.
	lacks func(ctx context.Context)
	// relaying is how many of a neighbour's relays are in use. Protected by mu.
	relaying map[*Device]int
}

// Run brings the pieces, or as many as there is time for. It returns when nothing is in progress, except Reads. called
// is a Crew that may take part, or nil. Done of each piece tells whether the device has it. After an error, later
// pieces may be Done although an earlier one is not.
func (p *Fill) Run(ctx context.Context, called *Crew) error {
	p.ctx, p.began = ctx, time.Now()
	p.Device.fills.Add(1)
	defer p.Device.fills.Add(-1)
	p.cold.Store(p.Cold)
	p.startSharing()
	if len(p.Pieces) > 0 {
		p.From.Ask(p.Pieces[0].first())
	}
	if p.From.Direct != nil {
		p.warmth = make([]atomic.Int32, len(p.Pieces))
		p.hold = newHold(p.From)
		defer p.hold.drop()
		defer p.From.report()
	}
	p.mu.Lock()
	over := p.overLocked()
	p.mu.Unlock()
	switch {
	case over:
	case len(p.Pieces) == 1:
		p.alone()
	default:
		p.run(called)
	}
	p.endSharing()
	if p.Reads != nil {
		p.Reads.wait = p.lacks
	}
	return p.err
}

// alone brings the only piece, without other workers.
func (p *Fill) alone() {
	p.mu.Lock()
	p.next = 1
	p.mu.Unlock()
	x := p.piece(0)
	if len(x.Steps) == 0 {
		return // another Fill brings it
	}
	err := p.read(0, x)
	if err == nil {
		err = p.send([]*Piece{x}, nil)
	}
	if err != nil {
		p.fail(err)
		return
	}
	p.Into.Sent([]*Piece{x})
	p.arrived([]*Piece{x})
}

// run brings pieces until all are there, the time is over, or something failed. It returns when no piece is in
// progress. The caller works, too, because waking goroutines takes time. Goroutines that wake up too late find nothing
// to do, and run does not wait for them.
func (p *Fill) run(called *Crew) {
	p.mu.Lock()
	n := min(p.goroutinesLocked(), len(p.Pieces))
	p.mu.Unlock()
	largest, total := int64(0), int64(0)
	for i := range p.Pieces {
		largest, total = max(largest, p.Pieces[i].bytes), total+p.Pieces[i].bytes
	}
	p.workers, p.leastCall = n, min(max(total/fewCalls, leastCall), mostLeastCall)
	buffers := min(int64(buffered(n, len(p.Relays)))/largest, int64(len(p.Pieces)))
	p.slots = make(chan struct{}, buffers)
	p.idle = make(chan struct{})
	if called == nil {
		called = CallCrew()
	}
	p.readers = n
	called.begin(p, min(n, Readers())-1)
	for range n - min(n, Readers()) {
		go p.work(false)
	}
	p.work(true)
	p.mu.Lock()
	p.ended = true
	if p.busy == 0 {
		close(p.idle)
	}
	p.mu.Unlock()
	spinOn(p.idle)
}

// work reads and sends pieces until there are none. Workers come and go as goroutinesLocked says; the caller stays.
func (p *Fill) work(stays bool) {
	for {
		p.slots <- struct{}{}
		i, x := p.take(stays)
		if x == nil {
			<-p.slots
			return
		}
		if ahead := i + p.workers; p.From.Direct != nil && ahead < len(p.Pieces) && !p.cold.Load() {
			p.isWarm(ahead) // now, because at its turn mu is held
		}
		if err := p.read(i, x); err != nil {
			p.fail(err)
			<-p.slots
			x = nil
		}
		p.pass(x)
	}
}

// take gives a worker its next piece, which has number i. Pieces are taken in order, so those that were taken are a
// prefix. If there is none, the worker sends what others left.
func (p *Fill) take(stays bool) (i int, x *Piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	most := p.goroutinesLocked()
	if !stays && p.readers > most {
		p.readers--
		return 0, nil
	}
	if p.ended {
		return 0, nil
	}
	p.busy++
	for !p.overLocked() {
		i := p.next
		p.next++
		p.mu.Unlock()
		x := p.piece(i)
		p.mu.Lock()
		if len(x.Steps) > 0 {
			if p.readers < min(most, len(p.Pieces)-p.next) {
				p.readers++
				go p.work(false)
			}
			return i, x
		}
	}
	p.sendLocked()
	p.restLocked()
	return 0, nil
}

// overLocked reports whether no more pieces are to be taken. Once true, it stays true.
func (p *Fill) overLocked() bool {
	if p.err == nil {
		p.err = p.ctx.Err()
	}
	return p.err != nil || p.next == len(p.Pieces) || p.next > 0 && !p.Until.IsZero() && time.Now().After(p.Until) ||
		p.lacks != nil || p.From.Direct != nil && !p.thereLocked(p.next)
}

// pass accepts the piece that a worker has read, or nil, and sends if it is time.
func (p *Fill) pass(x *Piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var behind *Fill
	if x != nil {
		behind = x.behind
		p.ready, p.waiting = append(p.ready, x), p.waiting+x.bytes
	}
	// Without a free buffer, reading stops until somebody sends.
	if p.waiting >= p.leastCall || len(p.slots) == cap(p.slots) || p.overLocked() {
		p.sendLocked()
	}
	p.paceLocked(behind)
	p.restLocked()
}

// restLocked ends a worker's busy state.
func (p *Fill) restLocked() {
	if p.busy--; p.busy == 0 && p.ended {
		close(p.idle)
	}
}

// sendLocked sends what was read until nothing is left, unless enough others are sending over every link. It releases
// mu while it sends.
func (p *Fill) sendLocked() {
	var through *Relay
	if p.sending == senders {
		if through = p.takeRelayLocked(); through == nil {
			return
		}
	} else {
		p.sending++
	}
	var sent []*Piece
	for len(p.ready) > 0 && (through == nil || !through.broken && p.isFree(through)) {
		n, size := 0, int64(0)
		for ; n < len(p.ready) && size < callBytes; n++ {
			size += p.ready[n].bytes
		}
		call := p.ready[:n:n]
		p.ready, p.waiting = p.ready[n:], p.waiting-size
		p.mu.Unlock()
		if p.sendCall(call, size, through) {
			sent = append(sent, call...)
		}
		p.mu.Lock()
	}
	if through != nil {
		p.Relays = append(p.Relays, through)
		p.relaying[through.Device]--
	} else {
		p.sending--
	}
	if len(sent) > 0 {
		p.mu.Unlock() // others may send meanwhile
		p.arrived(sent)
		p.mu.Lock()
	}
}

// sendCall sends pieces of so many bytes, and reports whether the device has them.
func (p *Fill) sendCall(call []*Piece, size int64, through *Relay) bool {
	start := time.Now()
	err := p.send(call, through)
	if err != nil {
		p.fail(err)
	} else {
		p.Into.Sent(call)
	}
	if through == nil && err == nil && size >= mostLeastCall {
		p.mu.Lock()
		p.speed = float64(size) / time.Since(start).Seconds()
		p.mu.Unlock()
	}
	for _, x := range call {
		if x.given {
			p.inbox.took(x.memory)
		} else {
			<-p.slots
		}
	}
	return err == nil
}

func (p *Fill) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}

// read reads a piece from home, and makes its digests and patches. After an error the piece has no buffer.
func (p *Fill) read(i int, x *Piece) (err error) {
	if p.From.Locked != nil && p.readInPlace(x) {
		return nil
	}
	if p.From.Direct == nil {
		err = p.readBuffered(i, x)
	} else if r := p.takeRead(x); r != nil {
		err = p.taken(x, r)
	} else {
		err = p.readDirect(x)
	}
	if err != nil {
		x.withdraw()
		return err
	}
	x.share()
	return p.prepare(x)
}

// prepare makes the digests, copies and patches of a piece that was read. After an error the piece has no buffer.
func (p *Fill) prepare(x *Piece) error {
	var hashed, patched int64
	for k := range x.Steps {
		switch s := &x.Steps[k]; {
		case s.Patch:
			patched += s.Pages.Len()
			hashed += s.Pages.Len()
		case s.Storing:
			hashed += s.Pages.Len()
		}
	}
	if hashed > 0 {
		x.Sums = make([]gpubackend.Digest, hashed)
	}
	if patched > 0 {
		x.patches = make([]gpubackend.Patch, 0, patched)
	}
	if patched < x.bytes>>page.Shift {
		x.copies = make([]gpubackend.Copy, 0, len(x.Steps))
	}
	sums, of := x.Sums, p.Into.Placer()
	for s, buf := range x.parts() {
		var own []gpubackend.Digest
		if s.Hashed() {
			own, sums = sums[:s.Pages.Len()], sums[s.Pages.Len():]
			p.Device.dev.Key().SumPages(buf, own)
		}
		if !s.Patch {
			x.copies = of.AppendCopies(x.copies, s.Pages, buf)
			continue
		}
		var err error
		if x.patches, err = of.AppendPatches(x.patches, s, buf, own); err != nil {
			x.giveBack()
			return err
		}
	}
	if patched == 0 {
		p.pack(x)
	}
	return nil
}

// readBuffered reads a piece through the host's page cache.
func (p *Fill) readBuffered(i int, x *Piece) (err error) {
	if x.buf, x.giveBack, err = p.Device.dev.HostBuffer(int(x.bytes)); err != nil {
		return err
	}
	for s, buf := range x.parts() {
		if err := p.readStep(i, s, buf, &x.Ways); err != nil {
			x.giveBack()
			return err
		}
	}
	return nil
}

// readInPlace makes a piece that the device can copy from where it is locked, and reports whether it could. The host
// reads the bytes only to gather short runs.
func (p *Fill) readInPlace(x *Piece) bool {
	from, to := x.first().Offset(), x.Steps[len(x.Steps)-1].Pages.Span().End
	buf := p.From.Locked.At(from, to-from)
	if buf == nil || slices.ContainsFunc(x.Steps, func(s Step) bool { return s.Hashed() }) {
		return false
	}
	y := *x
	y.buf, y.inPlace, y.lent, y.giveBack = buf, true, true, func() {}
	var err error
	if !mapped.Try(func() { err = p.prepare(&y) }) || err != nil {
		return false // the file has become shorter
	}
	y.Ways.Locked = int64(page.Count(y.bytes)) // of rows, the device copies only what it wants
	*x = y
	return true
}

func pagesOf(steps []Step) (n int64) {
	for i := range steps {
		n += steps[i].Pages.Len()
	}
	return n
}

// readStep reads one run. If home has to be waited for, it also asks for the pieces that follow.
func (p *Fill) readStep(i int, s *Step, buf []byte, w *Ways) error {
	home, ok := p.From.Home.(HostCached)
	if !ok {
		w.Buffered += s.Pages.Len()
		return readWhole(p.From.Home, buf, s.Pages.Offset())
	}
	n := 0
	if !p.cold.Load() || s.Pages.Len() == 1 {
		var err error
		if n, err = home.ReadCached(buf, s.Pages.Offset()); err != nil {
			return err
		}
		w.Cached += int64(n) >> page.Shift
		if n == len(buf) {
			return nil
		}
	}
	w.Buffered += (int64(len(buf)-n) + page.Size - 1) >> page.Shift
	p.cold.Store(true)
	p.askAhead(i, home)
	m, err := home.ReadAt(buf[n:], s.Pages.Offset()+int64(n))
	if err != nil {
		return err
	}
	clear(buf[n+m:])
	return nil
}

// askAhead asks the host for the piece being read and a few that follow. The distance grows with every piece, up to
// aheadPieces. The request outlasts the Fill: the bytes arrive while CPU requests have their turn.
func (p *Fill) askAhead(i int, home HostCached) {
	p.mu.Lock()
	from := max(p.advised, i)
	to := min(max(from+2, i+1), i+aheadPieces, len(p.Pieces))
	p.advised = max(p.advised, to)
	p.mu.Unlock()
	for k := from; k < to; k++ {
		for _, s := range p.Pieces[k].Steps {
			home.WillNeed(s.Pages.Offset(), s.Pages.Bytes())
		}
	}
}

// callList is what one call gives to the device. For scattered pages it is long, so its memory is reused.
type callList struct {
	copies  []gpubackend.Copy
	patches []gpubackend.Patch
}

var callLists = sync.Pool{New: func() any { return new(callList) }}

// done empties the list and gives it back.
func (l *callList) done() {
	clear(l.copies)
	clear(l.patches)
	l.copies, l.patches = l.copies[:0], l.patches[:0]
	callLists.Put(l)
}

// send gives pieces that were read to the device, through a relay if that is not nil. It gives their buffers back.
func (p *Fill) send(pieces []*Piece, through *Relay) error {
	err := p.give(pieces, through)
	if errors.Is(err, gpubackend.ErrHostGone) {
		err = p.giveAgain(pieces, through)
	}
	for _, x := range pieces {
		x.giveBack()
		x.buf, x.copies, x.patches = nil, nil, nil
	}
	return err
}

// giveAgain is give for pieces of which some cannot be read in place any more, because the file has become shorter. It
// reads these first.
func (p *Fill) giveAgain(pieces []*Piece, through *Relay) error {
	for _, x := range pieces {
		if !x.inPlace {
			continue
		}
		x.inPlace, x.lent, x.bytes, x.copies, x.Ways = false, false, pagesOf(x.Steps)<<page.Shift, nil, Ways{}
		err := p.readBuffered(0, x)
		if err == nil {
			err = p.prepare(x)
		}
		if err != nil {
			x.giveBack = func() {} // it has no buffer
			return err
		}
	}
	return p.give(pieces, through)
}

// give is send without giving buffers back.
func (p *Fill) give(pieces []*Piece, through *Relay) error {
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
		if p.Ready != nil {
			if err := p.Ready(p.ctx, copies); err != nil {
				return err
			}
		}
		if err := p.in(copies, through); err != nil {
			return err
		}
	}
	if len(patches) > 0 {
		// A patched page that is not reported would be compared with the older base, and home's bytes would be taken
		// for the device's. So a patch that has begun is not cancelled.
		if err := p.Device.Patch(context.WithoutCancel(p.ctx), p.Class, patches); err != nil {
			return err
		}
	}
	return nil
}

// arrived reports pieces that the device has.
func (p *Fill) arrived(pieces []*Piece) {
	slices.SortFunc(pieces, func(a, b *Piece) int { return cmp.Compare(a.first(), b.first()) })
	for _, x := range pieces {
		x.Done = true
	}
	p.Into.Arrived(pieces)
}

// readWhole fills p from off on. Bytes past the end of the file read as zero.
func readWhole(home Home, p []byte, off int64) error {
	n, err := home.ReadAt(p, off)
	if err != nil {
		return err
	}
	clear(p[n:])
	return nil
}
