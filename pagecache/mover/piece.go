package mover

import (
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Update is pages that are to be brought from home.
type Update struct {
	Pages page.Range
	// Patch says that programs store into them, so that what home changed is patched in.
	Patch bool
}

// Run is pages into which programs may, or may not, be storing.
type Run struct {
	Pages   page.Range
	Storing bool
}

// Step is a part of an update.
type Step struct {
	Pages page.Range
	// Update is the number of the update.
	Update int
	Patch  bool
	// Storing says that programs may be storing into the pages.
	Storing bool
}

// Hashed reports whether the host takes the digests, from the very bytes that are copied. Where no program can be
// storing the device takes them later, from its copy.
func (s *Step) Hashed() bool { return s.Storing || s.Patch }

// Piece is what is read into one buffer.
type Piece struct {
	Steps []Step
	// Sums has the digests of the steps that are Hashed, one after the other.
	Sums []gpubackend.Digest
	Ways Ways
	// Done says that the device has the bytes.
	Done bool
	// bytes are what is read; what is sent, once they are packed.
	bytes int64

	// buf holds the steps' bytes one after the other, between read and send. giveBack takes it.
	buf      []byte
	giveBack func()
	// copies brings the steps that are not patched up to date, patches the others. They are made along with the read,
	// by those who read at once, and the digests while the bytes are in the processor's cache.
	copies  []gpubackend.Copy
	patches []gpubackend.Patch
	// held says that home is read by Run itself, for it changed when it was read ahead.
	held bool
	// shares are what others get of it; given says that it is such a share.
	shares []Share
	given  bool
}

// Bytes returns how many bytes the piece has.
func (x *Piece) Bytes() int64 { return x.bytes }

// first is the first page.
func (x *Piece) first() page.Index { return x.Steps[0].Pages.Start }

// pieceFor returns the most bytes of a piece of updates.
func pieceFor(n int, at func(i int) Update) int64 {
	total := int64(0)
	for i := range n {
		total += at(i).Pages.Bytes()
	}
	return min(max(total/int64(2*Readers()), LeastPiece), PieceBytes) &^ (page.Size - 1)
}

// Pieces cuts n updates into pieces, by what programs may be storing into. What lies in one of spans is a piece of its
// own. All are ascending.
func Pieces(n int, at func(i int) Update, storing []Run, spans []page.Range) (pieces []Piece) {
	c := cutter{most: pieceFor(n, at), storing: storing, spans: spans}
	// The pieces share one array of steps, of which each has its part in the end.
	c.steps = make([]Step, 0, n+len(storing)+len(spans))
	c.pieces = make([]Piece, 0, n/PieceRuns+len(storing)+2*len(spans)+2)
	for i := range n {
		c.cut(i, at(i))
	}
	c.seal()
	return c.pieces
}

// cutter is the work of Pieces.
type cutter struct {
	most    int64
	storing []Run
	spans   []page.Range
	steps   []Step
	pieces  []Piece
	count   int        // of the last piece
	within  page.Range // the span of the last piece
}

func (c *cutter) seal() {
	if n := len(c.pieces); n > 0 {
		c.pieces[n-1].Steps = c.steps[len(c.steps)-c.count : len(c.steps) : len(c.steps)]
	}
}

func (c *cutter) add(s Step, span page.Range) {
	if n := len(c.pieces); n > 0 && span == c.within && c.count < PieceRuns &&
		(c.pieces[n-1].bytes+s.Pages.Bytes() <= c.most || !span.Empty()) {
		c.pieces[n-1].bytes += s.Pages.Bytes()
		c.steps, c.count = append(c.steps, s), c.count+1
		return
	}
	c.seal()
	c.within = span
	c.steps, c.count = append(c.steps, s), 1
	c.pieces = append(c.pieces, Piece{bytes: s.Pages.Bytes()})
}

// cut adds the steps of an update.
func (c *cutter) cut(i int, u Update) {
	for at := u.Pages.Start; at < u.Pages.End; {
		for c.storing[0].Pages.End <= at {
			c.storing = c.storing[1:]
		}
		for len(c.spans) > 0 && c.spans[0].End <= at {
			c.spans = c.spans[1:]
		}
		var span page.Range
		end := min(u.Pages.End, c.storing[0].Pages.End)
		switch {
		case len(c.spans) > 0 && c.spans[0].Start <= at:
			span = c.spans[0]
			end = min(end, span.End)
		case len(c.spans) > 0:
			end = min(end, c.spans[0].Start, at+page.Index(c.most>>page.Shift))
		default:
			end = min(end, at+page.Index(c.most>>page.Shift))
		}
		c.add(Step{page.Range{Start: at, End: end}, i, u.Patch, c.storing[0].Storing}, span)
		at = end
	}
}
