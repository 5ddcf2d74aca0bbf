package prefetch

import "github.com/gaiafs/gaiafs/internal/page"

// StreamsOptions limits how far Streams reads ahead, in pages.
type StreamsOptions struct {
	// First is the first window of a stream that is known to be sequential. A stream that was just found begins with a
	// quarter of it, or with less if many of them ended early, but at least with two accesses.
	First int64
	// Most bounds the windows.
	Most int64
	// Table is how many streams are tracked in one file.
	Table int
}

// DeviceStreams has the thesis's windows, for transfers to devices. CPUStreams is for programs on the CPU, each of
// which may wait behind what is read ahead for others.
var (
	DeviceStreams = StreamsOptions{First: MinWindow, Most: MaxWindow, Table: 64}
	CPUStreams    = StreamsOptions{First: MinWindow, Most: 4 << 20 >> page.Shift, Table: 64}
)

const (
	// strideReach is the largest distance, in pages, between accesses of a strided stream: 16 MiB.
	strideReach = 16 << 20 >> page.Shift
	// stridePieces is how many pieces are read ahead of a strided stream, at most.
	stridePieces = 64
)

// Streams tracks several streams in one file, each by its last access and where the next one is expected: right after
// it, right before it, or as far away as the last time. A stream's window doubles whenever half of it was read, and is
// halved when pages went unused. A new stream replaces the one that was idle for longest. If that one left most of its
// window unread, new streams begin with half as much, until one has grown.
type Streams struct {
	o     StreamsOptions
	first int64 // first window of a stream that was just found
	end   page.Index
	clock uint64
	all   []stream
	// way is the direction of the stream for which the last access fetched something; alone if there was none.
	way direction
}

// direction is how a stream continues.
type direction uint8

const (
	alone    direction = iota // one access: the stream may continue in any way
	forward                   // the next access begins where the last one ended
	backward                  // the next access ends where the last one began
	strided                   // the next access begins stride pages from where the last one began
)

// stream is a tracked stream.
type stream struct {
	last   page.Range
	way    direction
	stride int64 // pages; while alone, a guess
	window int64 // pages to fetch ahead of the reads; 0 if there is none yet
	// ahead is how far was asked for: the end of that, or its start if backward, or the start of the last piece if
	// strided.
	ahead page.Index
	used  uint64 // the clock of the last access
}

// NewStreams makes a Streams. For numbers that are not positive, DeviceStreams' are used.
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
	case way == alone: // pages that the stream has just read
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

// find returns the stream that an access continues, and how: alone means that it rereads what the stream has just read
// or passed. If there is no such stream, guess is the stride from the nearest lone stream, 0 if there is none.
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
		// Accesses of partial pages share a page with the next one.
		case (x.way == alone || x.way == forward) && rg.Start >= l.Start && rg.Start <= l.End && rg.End > l.End:
			return x, forward, 0
		case (x.way == alone || x.way == backward) && rg.End <= l.End && rg.End >= l.Start && rg.Start < l.Start:
			return x, backward, 0
		// A single jump may be chance; the same jump twice is a stride.
		case (x.way == alone || x.way == strided) && jump == x.stride && jump != 0:
			return x, strided, 0
		// Several accesses of a stream may be in progress at once, and come in any order.
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

// replace returns the slot for a new stream.
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

// unread returns how many pages were asked for ahead and not read. For a strided stream, skipped pages do not count.
func (x *stream) unread() int64 {
	switch x.way {
	case backward:
		return max(int64(x.last.Start-x.ahead), 0)
	case strided:
		return max(int64(x.ahead-x.last.Start)/x.stride, 0) * x.last.Len()
	}
	return max(int64(x.ahead-x.last.End), 0)
}

// ask appends the part of the stream's window that was not asked for.
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

// Unused implements Predictor. It halves the window of the stream that had the pages fetched. If the window becomes
// smaller than the stream's accesses, the stream starts over as a lone access.
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
		// The pages are fetched again if the stream gets there.
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
