package prefetch

import "github.com/gaiafs/gaiafs/internal/page"

// StreamsOptions says how far Streams reads ahead, in pages.
type StreamsOptions struct {
	// First is the first window of a stream that is known to be sequential. One that was just found begins with a
	// quarter of it, or less where many of them came to nothing, but always with two accesses.
	First int64
	// Most bounds the windows.
	Most int64
	// Table is the number of streams that are told apart in one file.
	Table int
}

// DeviceStreams are the windows of the thesis, for transfers to devices; CPUStreams those for programs on the CPU, each
// of which waits behind what is read ahead for others.
var (
	DeviceStreams = StreamsOptions{First: MinWindow, Most: MaxWindow, Table: 64}
	CPUStreams    = StreamsOptions{First: MinWindow, Most: 4 << 20 >> page.Shift, Table: 64}
)

const (
	// strideReach is the most pages from one access of a strided stream to the next: 16 MiB.
	strideReach = 16 << 20 >> page.Shift
	// stridePieces is the most pieces that are read ahead of a strided stream.
	stridePieces = 64
)

// Streams knows several streams in one file, each by where it read last and where it is expected next: the page after
// the last one, the pages before it, or as far on as it went the last time. A stream's window doubles whenever half of
// it was read, and is halved for what it had fetched in vain. The stream that was continued longest ago makes room for
// a new one; if it left most of its window unread, new ones begin with half as much as before, until one has grown.
type Streams struct {
	o     StreamsOptions
	first int64 // pages that a stream begins with that was just found
	end   page.Index
	clock uint64
	all   []stream
	// way is that of the stream that the last access had something fetched for; alone if there was none.
	way direction
}

// direction is how a stream goes on.
type direction uint8

const (
	alone    direction = iota // one access: it may go on in any way
	forward                   // the next access begins where the last one ended
	backward                  // the next access ends where the last one began
	strided                   // the next access begins stride pages from where the last one began
)

// stream is one of them.
type stream struct {
	last   page.Range
	way    direction
	stride int64 // pages; of one that is alone, where it may be going
	window int64 // pages that will be read and are fetched before; 0 while there is none
	// ahead is up to where it was asked for: the end of that, the start if backward, the start of the last piece if
	// strided.
	ahead page.Index
	used  uint64 // the clock of the last access
}

// NewStreams makes a Streams. Numbers that are not positive stand for those of DeviceStreams.
func NewStreams(o StreamsOptions) *Streams {
	if o.First <= 0 {
		o.First = DeviceStreams.First
	}
	if o.Most <= 0 {
		o.Most = DeviceStreams.Most
	}
	if o.Table <= 0 {
		o.Table = DeviceStreams.Table
	}
	return &Streams{o: o, first: o.First / 4, end: endless}
}

// Access implements Predictor.
func (s *Streams) Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range {
	if rg.Empty() {
		return ahead
	}
	if p == Random {
		s.all = s.all[:0]
		return ahead
	}
	s.clock++
	s.way = alone
	x, way, guess := s.find(rg)
	switch {
	case x == nil:
		x = s.replace()
		*x = stream{last: rg, stride: guess, used: s.clock, ahead: rg.End}
		if p == Sequential {
			x.way, x.window = forward, s.o.First
			ahead = s.ask(x, ahead)
		}
		return ahead
	case way == alone: // pages that the stream has just been at
		x.used = s.clock
		return ahead
	case way != x.way:
		x.way, x.stride, x.window = way, int64(rg.Start-x.last.Start), 0
		x.ahead = rg.End
		if way != forward {
			x.ahead = rg.Start
		}
	}
	x.last, x.used = rg, s.clock
	switch unread := x.unread(); {
	case x.window == 0:
		x.window = min(max(s.first, 2*rg.Len()), s.o.Most)
	case unread > x.window/2:
		return ahead
	default:
		x.window = min(2*x.window, s.o.Most)
		if x.window >= s.o.First {
			s.first = min(2*s.first+1, s.o.First/4)
		}
	}
	s.way = x.way
	return s.ask(x, ahead)
}

// find returns the stream that an access continues, and how: alone if it only reads what that has just read or passed.
// Where there is none, guess is the stride from the nearest stream that an access of its own may have begun; 0: there
// is none.
func (s *Streams) find(rg page.Range) (again *stream, way direction, guess int64) {
	reach := int64(strideReach) + 1
	var early *stream
	for i := range s.all {
		x := &s.all[i]
		l := x.last
		jump := int64(rg.Start - l.Start)
		switch {
		case rg.Start >= l.Start && rg.End <= l.End:
			again = x
		// Accesses that are not of whole pages share one with the next.
		case (x.way == alone || x.way == forward) && rg.Start >= l.Start && rg.Start <= l.End && rg.End > l.End:
			return x, forward, 0
		case (x.way == alone || x.way == backward) && rg.End <= l.End && rg.End >= l.Start && rg.Start < l.Start:
			return x, backward, 0
		// Two accesses are a stride by chance only; the same stride twice is one.
		case (x.way == alone || x.way == strided) && jump == x.stride && jump != 0:
			return x, strided, 0
		// Several accesses of one stream are under way at once, and come in any order.
		case x.way == forward && rg.Start > l.End && rg.End <= x.ahead:
			early = x
		case x.way == forward && rg.End <= l.End && rg.Start >= l.Start-page.Index(x.window):
			again = x
		case x.way == alone && jump != 0 && max(jump, -jump) < reach:
			guess, reach = jump, max(jump, -jump)
		}
	}
	if again == nil && early != nil {
		return early, forward, 0
	}
	return again, alone, guess
}

// replace returns a place for a new stream.
func (s *Streams) replace() *stream {
	if len(s.all) < s.o.Table {
		s.all = append(s.all, stream{})
		return &s.all[len(s.all)-1]
	}
	oldest := &s.all[0]
	for i := range s.all {
		if s.all[i].used < oldest.used {
			oldest = &s.all[i]
		}
	}
	if oldest.window > 0 && oldest.unread() > oldest.window/2 {
		s.first /= 2
	}
	return oldest
}

// unread returns the pages that were asked for ahead and not read: of a strided stream without those in between.
func (x *stream) unread() int64 {
	switch x.way {
	case backward:
		return max(int64(x.last.Start-x.ahead), 0)
	case strided:
		return max(int64(x.ahead-x.last.Start)/x.stride, 0) * x.last.Len()
	}
	return max(int64(x.ahead-x.last.End), 0)
}

// ask appends what the stream's window has and was not asked for.
func (s *Streams) ask(x *stream, ahead []page.Range) []page.Range {
	switch x.way {
	case forward:
		start := max(x.ahead, x.last.End)
		x.ahead = x.last.End + page.Index(x.window)
		return add(ahead, page.Range{Start: start, End: x.ahead}, s.end)
	case backward:
		end := min(x.ahead, x.last.Start)
		x.ahead = max(x.last.Start-page.Index(x.window), 0)
		return add(ahead, page.Range{Start: x.ahead, End: end}, s.end)
	}
	// The window counts pages that will be read; those in between are skipped.
	n := page.Index(x.last.Len())
	pieces := page.Index(min(max(x.window/int64(n), 1), stridePieces))
	step := page.Index(x.stride)
	asked := max((x.ahead-x.last.Start)/step, 0)
	for k := asked + 1; k <= pieces; k++ {
		start := x.last.Start + k*step
		if start < 0 || start >= s.end {
			break
		}
		ahead = add(ahead, page.Range{Start: start, End: start + n}, s.end)
		x.ahead = start
	}
	return ahead
}

// Unused implements Predictor. The window of a stream that had the pages fetched is halved; one that gets smaller than
// the stream's accesses is closed, and the stream is to be found again.
func (s *Streams) Unused(rg page.Range) {
	for i := range s.all {
		x := &s.all[i]
		had := page.Range{Start: min(x.last.Start, x.ahead), End: max(x.last.End, x.ahead+page.Index(x.last.Len()))}
		if x.window == 0 || !had.Overlaps(rg) {
			continue
		}
		if x.window /= 2; x.window < x.last.Len() {
			*x = stream{last: x.last, used: x.used, ahead: x.last.End}
			continue
		}
		// They are to be fetched again should the stream come that far.
		switch x.way {
		case forward:
			x.ahead = min(x.ahead, max(rg.Start, x.last.End))
		case backward:
			x.ahead = max(x.ahead, min(rg.End, x.last.Start))
		case strided:
			x.ahead = x.last.Start
		}
	}
}

// Resize implements Predictor.
func (s *Streams) Resize(end page.Index) {
	s.end = end
	keep := s.all[:0]
	for _, x := range s.all {
		if x.last.Start < end {
			if x.way != backward {
				x.ahead = min(x.ahead, end)
			}
			keep = append(keep, x)
		}
	}
	s.all = keep
}
