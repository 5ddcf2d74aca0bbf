package mover

import (
	"iter"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Update is pages to be brought from home.
type Update struct {
	Pages page.Range
	// Patch means that programs store into them, so home's changes are patched in.
	Patch bool
}

// Run is pages that programs may be storing into, or not.
type Run struct {
	Pages   page.Range
	Storing bool
}

// Step is part of an update.
type Step struct {
	Pages page.Range
	// Update is the index of the update.
	Update int
	Patch  bool
	// Storing means that programs may be storing into the pages.
	Storing bool
}

// Hashed reports whether the host computes the digests, from the very bytes that are copied. If no program can be
// storing into the pages, the device computes them later from its copy.
func (s *Step) Hashed() bool { return s.Storing || s.Patch }

// Piece is what is read into one buffer.
type Piece struct {
	Steps []Step
	// Sums has the digests of the Hashed steps, one after the other.
	Sums []gpubackend.Digest
	Ways Ways
	// Done means that the device has the bytes.
	Done bool
	// bytes is how many are read; after pack, how many the device gets.
	bytes int64

	// buf holds the steps' bytes one after the other, from read until send, which calls giveBack. If inPlace is set, it
	// shows the file from the first to the last of them instead.
	buf      []byte
	inPlace  bool
	giveBack func()
	// lent means that other pieces use buf, too, so its bytes must not change. Set before others see it.
	lent bool
	// copies bring the steps that are not patched, patches the others. Readers make them in parallel, right after the
	// read, and the digests while the bytes are in the processor's cache.
	copies  []gpubackend.Copy
	patches []gpubackend.Patch
	// held means that Run reads home itself, because home changed under a read ahead.
	held bool
	// shares are the parts that other Fills get; given means that this piece is such a part.
	shares []Share
	given  bool
	// behind is a Fill that got a share and has much to send, or nil.
	behind *Fill
	// memory is what a given piece counts for in the inbox.
	memory int64
}

// Bytes returns how many bytes the piece has.
func (x *Piece) Bytes() int64 { return x.bytes }

// first returns the first page.
func (x *Piece) first() page.Index { return x.Steps[0].Pages.Start }

// parts yields the steps, each with its bytes in buf.
func (x *Piece) parts() iter.Seq2[*Step, []byte] {
	return func(yield func(*Step, []byte) bool) {
		at := int64(0)
		for k := range x.Steps {
			s := &x.Steps[k]
			if x.inPlace {
				at = s.Pages.Offset() - x.first().Offset()
			}
			if !yield(s, x.buf[at:at+s.Pages.Bytes()]) {
				return
			}
			at += s.Pages.Bytes()
		}
	}
}

// pieceFor returns the largest size of a piece for these updates, in bytes.
func pieceFor(n int, at func(i int) Update) int64 {
	total := int64(0)
	for i := range n {
		total += at(i).Pages.Bytes()
	}
	return min(max(total/int64(2*Readers()), LeastPiece), PieceBytes) &^ (page.Size - 1)
}

// Pieces cuts n updates into pieces, split at the boundaries of storing. The part in each of spans is a separate piece.
// All lists are ascending.
func Pieces(n int, at func(i int) Update, storing []Run, spans []page.Range) (pieces []Piece) {
	return piecesOf(pieceFor(n, at), n, at, storing, spans)
}

// PiecesInPlace is Pieces for what is copied from where it is locked (Source.Locked), into which no program stores.
// sparse says how many bytes there are for each one that the device wants: a piece is that many times as large as
// others, within a limit. size is the size of the file in bytes. A last page that it fills only in part is a piece of
// its own, because it is read.
func PiecesInPlace(size, sparse int64, n int, at func(i int) Update) []Piece {
	all := page.Range{End: at(n - 1).Pages.End}
	rest := page.Range{Start: page.Index(size >> page.Shift), End: page.Count(size)}
	var spans []page.Range
	if !rest.Empty() {
		spans = append(spans, rest)
	}
	return piecesOf(min(max(sparse, 1), mostSparse)*pieceFor(n, at), n, at, []Run{{Pages: all}}, spans)
}

// mostSparse is how many times as large as others a piece is at most.
const mostSparse = 8

func piecesOf(most int64, n int, at func(i int) Update, storing []Run, spans []page.Range) (pieces []Piece) {
	c := cutter{most: most, storing: storing, spans: spans}
	// The pieces share one array of steps; seal gives each its part.
	c.steps = make([]Step, 0, n+len(storing)+len(spans))
	c.pieces = make([]Piece, 0, n/PieceRuns+len(storing)+2*len(spans)+2)
	for i := range n {
		c.cut(i, at(i))
	}
	c.seal()
	return c.pieces
}

// cutter is the state of Pieces.
type cutter struct {
	most    int64
	storing []Run
	spans   []page.Range
	steps   []Step
	pieces  []Piece
	count   int        // steps of the last piece
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
