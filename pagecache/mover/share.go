package mover

import (
	"sync"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Fills of one file that run at once may share what they read. Before a piece is read, its Fill asks the Sharer for
// what nobody else brings, and who else wants it; what was read goes to all of them, each in the copies that its Placer
// makes. The Fill that gets a share sends it along with its own pieces. Nobody waits for the device of another Fill:
// where one does not keep up, it is offered nothing more, and reads the rest itself; where home or the reader fails,
// too.
//
//	claimed ──read by the worker──▶ handed to each Share ──▶ sent by their Fills
//	   └─home fails, Run ends──▶ returned

// Sharer is a Target whose Fill shares reads with others.
type Sharer interface {
	Target
	// Claim returns, for the pages of each piece, those that nobody brings yet, which the caller reads, and what others
	// get of them. It is called with the lock of the Fill held, before the reads begin.
	Claim(pieces [][]page.Range) []Claim
	// Return says that what the Fill was offered of pages is not brought.
	Return(pages []page.Range)
	// Close is called when the Fill has begun all its reads: after it nobody offers it anything.
	Close()
}

// Claim is what a Fill reads of a piece, and what others get of it.
type Claim struct {
	Pages  []page.Range
	Shares []Share
}

// Share is pages of a piece that another Fill gets. Offer made it.
type Share struct {
	Fill  *Fill
	Pages []page.Range
}

const (
	// mostInbox is the bytes of shares up to which a Fill is offered more, and inboxBytes the least that its caller
	// sends while more is on its way.
	mostInbox  = 64 << 20
	inboxBytes = mostLeastCall
	// mostClaimed is how many pieces are claimed at once, for claims of all Fills of a file wait for each other;
	// leastClaims is how many claims each should make at least, so that all of them have something to read.
	mostClaimed = 8
	leastClaims = 64
)

// inbox counts what others read for a Fill. Its bytes are those that the device gets: much less than is read where the
// Fill wants a few bytes of each page.
type inbox struct {
	mu      sync.Mutex
	offered int           // shares that were offered and are not there yet; protected by mu
	bytes   int64         // of shares that are there and were not sent yet; protected by mu
	each    int64         // of the last that came: about what others will have. Protected by mu
	moved   chan struct{} // has an element when something came; made by the first offer. Protected by mu
}

// Offer returns a share of pages that another Fill is going to read, unless p has more than it can send. What claim
// returns is what p gets; where that is nothing, ok is false. The caller sees to it that p has not closed.
func (p *Fill) Offer(claim func() []page.Range) (s Share, ok bool) {
	b := &p.inbox
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bytes+int64(b.offered)*b.each >= mostInbox {
		return s, false
	}
	s = Share{p, claim()}
	if len(s.Pages) == 0 {
		return s, false
	}
	if b.moved == nil {
		b.moved = make(chan struct{}, 1)
	}
	b.offered++
	return s, true
}

// came says that a share of so many bytes is there, or with 0 that it will not be.
func (b *inbox) came(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.offered--
	if b.bytes += bytes; bytes > 0 {
		b.each = bytes
	}
	select {
	case b.moved <- struct{}{}:
	default:
	}
}

// took says that so many bytes of shares take no memory any more.
func (b *inbox) took(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= bytes
}

// pieceLocked returns piece i as it is to be read. Where others may bring parts of it, it is claimed by the first call,
// and has no steps where nothing is left.
func (p *Fill) pieceLocked(i int) *Piece {
	of, ok := p.Into.(Sharer)
	if !ok {
		return &p.Pieces[i]
	}
	if p.claimed == nil {
		p.claimed = make([]*Piece, len(p.Pieces))
	}
	if p.claimed[i] == nil {
		p.claimLocked(of, i)
	}
	return p.claimed[i]
}

// claimLocked claims piece i, and some of those that follow.
func (p *Fill) claimLocked(of Sharer, i int) {
	var pieces [][]page.Range
	for n := i + max(min(len(p.Pieces)/leastClaims, mostClaimed), 1); i+len(pieces) < min(n, len(p.Pieces)); {
		pieces = append(pieces, p.Pieces[i+len(pieces)].ranges())
	}
	for k, c := range of.Claim(pieces) {
		x := &Piece{shares: c.Shares}
		x.setPages(c.Pages)
		p.claimed[i+k] = x
	}
}

// setPages has the piece be of these pages, which no program stores into.
func (x *Piece) setPages(pages []page.Range) {
	x.Steps = make([]Step, len(pages))
	for i, rg := range pages {
		x.Steps[i].Pages = rg
		x.bytes += rg.Bytes()
	}
}

// share hands what others get of a piece that was read to their Fills.
func (x *Piece) share() {
	for _, s := range x.shares {
		if y := s.piece(x); y != nil {
			s.Fill.hand(y)
		} else {
			s.withdraw()
		}
	}
	x.shares = nil
}

// piece returns what a share gets of x, in a buffer of its own: prepare moves bytes about in that of x. It returns nil
// where there is no such buffer, or it would be much larger, since the same bytes go to many places.
func (s *Share) piece(x *Piece) *Piece {
	var copies []gpubackend.Copy
	at, of, left := int64(0), s.Fill.Into.Placer(), s.Pages
	for _, step := range x.Steps {
		for len(left) > 0 && step.Pages.Contains(left[0].Start) {
			from := at + left[0].Offset() - step.Pages.Offset()
			copies = of.AppendCopies(copies, left[0], x.buf[from:][:left[0].Bytes()])
			left = left[1:]
		}
		at += step.Pages.Bytes()
	}
	total := 0
	for _, c := range copies {
		total += len(c.Host)
	}
	if total > 2*PieceBytes {
		return nil
	}
	y := &Piece{given: true}
	y.setPages(s.Pages)
	y.bytes = int64(total)
	var err error
	if y.buf, y.giveBack, err = s.Fill.Device.dev.HostBuffer(max(total, 1)); err != nil {
		return nil
	}
	y.copies = gather(copies, y.buf)
	return y
}

// gather moves the bytes of copies into buf, and joins those that follow each other in device memory.
func gather(copies []gpubackend.Copy, buf []byte) (joined []gpubackend.Copy) {
	at := 0
	for _, c := range copies {
		n := copy(buf[at:], c.Host)
		if k := len(joined) - 1; k >= 0 && joined[k].Mem == c.Mem && joined[k].Off+int64(len(joined[k].Host)) == c.Off {
			joined[k].Host = joined[k].Host[:len(joined[k].Host)+n]
		} else {
			joined = append(joined, gpubackend.Copy{Mem: c.Mem, Off: c.Off, Host: buf[at : at+n]})
		}
		at += n
	}
	return joined
}

// hand gives p a share that was read by another Fill. It does not wait for the device.
func (p *Fill) hand(y *Piece) {
	p.mu.Lock()
	p.ready, p.waiting = append(p.ready, y), p.waiting+y.bytes
	p.mu.Unlock()
	p.inbox.came(y.bytes)
}

// withdraw says that what others were to get of a piece does not come from it.
func (x *Piece) withdraw() {
	for _, s := range x.shares {
		s.withdraw()
	}
	x.shares = nil
}

func (s *Share) withdraw() {
	s.Fill.Into.(Sharer).Return(s.Pages)
	s.Fill.inbox.came(0)
}

// endSharing ends what a Sharer's Fill has to do with others: what they were to get of pieces that were not read goes
// back, and it waits for what others are reading for it.
func (p *Fill) endSharing() {
	of, ok := p.Into.(Sharer)
	if !ok {
		return
	}
	p.mu.Lock()
	claimed := p.claimed
	p.mu.Unlock()
	for _, x := range claimed { // after an error some were not read
		if x != nil {
			x.withdraw()
		}
	}
	of.Close()
	for p.receive() {
		<-p.inbox.moved
	}
}

// receive sends what others have read for p, and reports whether more is to come.
func (p *Fill) receive() (more bool) {
	b := &p.inbox
	b.mu.Lock()
	more = b.offered > 0
	b.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !more || p.waiting >= inboxBytes {
		p.sendLocked()
	}
	return more
}
