package mover

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Concurrent Fills of one file may share what they read. Before it reads a piece, a Fill asks the Sharer which pages
// nobody else brings, and which other Fills want them. What was read goes to all of them, each in the copies that its
// Placer makes. The Fill that gets a share sends it along with its own pieces. Readers slow down, within limits, for a
// Fill that is behind (paceLocked). If it still does not keep up, it gets no more offers, and reads the rest itself. So
// does a Fill if home or the reader fails.
//
//	claimed ──read by the worker──▶ handed to each Share ──▶ sent by their Fills
//	   └─home fails, Run ends──▶ returned
//
// All shares of a piece use the buffer that it was read into, and so does the piece itself. The bytes stay as they are
// until the last of them was sent, which gives the buffer back, perhaps after the Run that read it. A share with many
// copies is first gathered into a buffer of its own.

// Sharer is a Target whose Fill shares reads with others.
type Sharer interface {
	Target
	// Claim returns, for each piece, the pages that nobody brings yet, which the caller must read, and the shares of
	// others in them. It is called before the reads begin. Calls for one Fill do not overlap.
	Claim(pieces [][]page.Range) []Claim
	// Return says that pages that were offered to the Fill will not be brought.
	Return(pages []page.Range)
	// Close is called when the Fill has begun all its reads. After it, nobody offers the Fill anything.
	Close()
}

// Claim is what a Fill reads of a piece, and what others get of it.
type Claim struct {
	Pages  []page.Range
	Shares []Share
}

// Share is the pages of a piece that another Fill gets. Offer makes it.
type Share struct {
	Fill  *Fill
	Pages []page.Range
}

const (
	// mostInbox limits the memory of shares: above it, a Fill gets no more offers. Each user of a buffer counts for an
	// equal part of it. So all Fills of a file together hold at most mostInbox for each of them. inboxBytes is the
	// least that the Fill's caller sends while more shares are coming.
	mostInbox  = 64 << 20
	inboxBytes = mostLeastCall
	// mostClaimed limits how many pieces are claimed at once, because claims of all Fills of a file wait for each
	// other. leastClaims is how many claims each Fill should make at least, so that all Fills have something to read.
	mostClaimed = 8
	leastClaims = 64
)

// inbox counts what others read for a Fill, by the memory that it takes (Piece.memory). That is much less than is read
// if others use the same buffers, or if the Fill wants a few bytes of each page.
type inbox struct {
	mu      sync.Mutex
	offered int           // shares that were offered and have not come; protected by mu
	bytes   int64         // memory of shares that have come and were not sent; protected by mu
	each    int64         // of the last share, as an estimate of those to come. Protected by mu
	sent    time.Time     // when a share was sent last; protected by mu
	moved   chan struct{} // has an element when something came; made by the first offer. Protected by mu
}

// Offer returns p's share in pages that another Fill is going to read. claim returns the pages that p wants. ok is
// false if there are none, or if p has more than it can send. The caller makes sure that p has not closed.
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

// came notes that a share of so many bytes has come; 0 means that it will not come.
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

// took notes that so many bytes of shares were sent.
func (b *inbox) took(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= bytes
	b.sent = time.Now()
}

// startSharing prepares claims.
func (p *Fill) startSharing() {
	if _, ok := p.Into.(Sharer); ok {
		p.claimed = make([]atomic.Pointer[Piece], len(p.Pieces))
	}
}

// piece returns piece i as it is to be read. If other Fills may bring parts of it, the first call claims it, and all
// before it; then it has no steps if nothing is left to read.
func (p *Fill) piece(i int) *Piece {
	if p.claimed == nil {
		return &p.Pieces[i]
	}
	if x := p.claimed[i].Load(); x != nil {
		return x
	}
	p.claimMu.Lock()
	defer p.claimMu.Unlock()
	for p.claims <= i {
		p.claim()
	}
	return p.claimed[i].Load()
}

// claim claims the next pieces. The caller holds claimMu.
func (p *Fill) claim() {
	n := min(max(min(len(p.Pieces)/leastClaims, mostClaimed), 1), len(p.Pieces)-p.claims)
	pieces := make([][]page.Range, n)
	for k := range pieces {
		pieces[k] = p.Pieces[p.claims+k].ranges()
	}
	for _, c := range p.Into.(Sharer).Claim(pieces) {
		x := &Piece{shares: c.Shares}
		x.setPages(c.Pages)
		p.claimed[p.claims].Store(x)
		p.claims++
	}
}

// setPages gives the piece these pages, which no program stores into.
func (x *Piece) setPages(pages []page.Range) {
	x.Steps = make([]Step, len(pages))
	for i, rg := range pages {
		x.Steps[i].Pages = rg
		x.bytes += rg.Bytes()
	}
}

// lease counts the pieces that use a buffer. The last one gives it back.
type lease struct {
	users    atomic.Int32
	giveBack func()
}

// take adds a piece. It returns the function that gives up the piece's part, for one call.
func (l *lease) take() (drop func()) {
	l.users.Add(1)
	return func() {
		if l.users.Add(-1) == 0 {
			l.giveBack()
		}
	}
}

// share hands the other Fills their shares of a piece that was read. They use its buffer.
func (x *Piece) share() {
	if len(x.shares) == 0 {
		return
	}
	l := &lease{giveBack: x.giveBack}
	x.giveBack, x.lent = l.take(), true
	part := int64(len(x.buf) / (1 + len(x.shares)))
	for i := range x.shares {
		s := &x.shares[i]
		if y := s.piece(x, l, part); y != nil {
			s.Fill.hand(y)
			if s.Fill.inbox.isLong() {
				x.behind = s.Fill
			}
		} else {
			s.Withdraw()
		}
	}
	x.shares = nil
}

// piece returns a share of x as a piece that uses x's buffer, of which it counts for part. It returns nil if the same
// bytes go to too many places.
func (s *Share) piece(x *Piece, l *lease, part int64) *Piece {
	y := &Piece{given: true, buf: x.buf, lent: true}
	y.setPages(s.Pages)
	of, left := s.Fill.Into.Placer(), s.Pages
	for step, buf := range x.parts() {
		for len(left) > 0 && step.Pages.Contains(left[0].Start) {
			from := left[0].Offset() - step.Pages.Offset()
			y.copies = of.AppendCopies(y.copies, left[0], buf[from:][:left[0].Bytes()])
			left = left[1:]
		}
	}
	if copySizes(y.copies) > mostGathered {
		return nil
	}
	y.giveBack = l.take()
	s.Fill.pack(y)
	if y.memory = y.bytes; y.lent {
		y.memory = max(y.bytes, part)
	}
	return y
}

const (
	// paceTime is how long a worker waits before it looks again. A worker waits for at most 1/patience of its time.
	paceTime = 100 * time.Microsecond
	patience = 2
	// stuckTime is for how long a Fill must have sent nothing to count as stuck. Nobody waits for it then.
	stuckTime = 200 * time.Millisecond
)

// paceLocked waits while another Fill is so far behind that it would soon get no more offers, and would have to read
// again what this one reads. It waits for a part of its time only, because the other device may be slow. It releases
// mu, and sends meanwhile.
func (p *Fill) paceLocked(behind *Fill) {
	for behind != nil && behind.inbox.isLong() && p.err == nil && p.ctx.Err() == nil && p.next < len(p.Pieces) {
		if time.Duration(p.paced.Load()) > time.Since(p.began)*time.Duration(p.workers)/patience {
			return
		}
		if p.waiting >= p.leastCall {
			p.sendLocked()
		}
		p.mu.Unlock()
		start := time.Now()
		time.Sleep(paceTime)
		p.paced.Add(int64(time.Since(start)))
		p.mu.Lock()
	}
}

// isLong reports whether more than half of what fits in is there, and is being sent.
func (b *inbox) isLong() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes > mostInbox/2 && time.Since(b.sent) < stuckTime
}

// hand gives p a share that another Fill has read. It does not wait for the device.
func (p *Fill) hand(y *Piece) {
	p.mu.Lock()
	p.ready, p.waiting = append(p.ready, y), p.waiting+y.bytes
	p.mu.Unlock()
	p.inbox.came(y.memory)
}

// withdraw says that the other Fills do not get their shares of a piece.
func (x *Piece) withdraw() {
	for _, s := range x.shares {
		s.Withdraw()
	}
	x.shares = nil
}

// Withdraw says that the other Fill does not get its share.
func (s *Share) Withdraw() {
	s.Fill.Into.(Sharer).Return(s.Pages)
	s.Fill.inbox.came(0)
}

// endSharing withdraws the shares in pieces that were not read, and waits for what others are reading for this Fill.
func (p *Fill) endSharing() {
	if p.claimed == nil {
		return
	}
	for i := range p.claimed {
		if x := p.claimed[i].Load(); x != nil { // after an error, some were not read
			x.withdraw()
		}
	}
	p.Into.(Sharer).Close()
	for p.receive() {
		<-p.inbox.moved
	}
}

// receive sends what others have read for p, and reports whether more will come.
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
