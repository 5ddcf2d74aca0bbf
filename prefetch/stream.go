package prefetch

import "github.com/gaiafs/gaiafs/internal/page"

const (
	// MinWindow is the first window of a stream known to be sequential, in pages (512 KiB).
	MinWindow = 512 << 10 >> page.Shift
	// MaxWindow bounds the window, in pages (16 MiB).
	MaxWindow = 16 << 20 >> page.Shift
)

// Pattern is what the program said of its accesses.
type Pattern uint8

const (
	// Unknown leaves it to be found out: the second access that continues the first opens a window.
	Unknown Pattern = iota
	// Sequential opens a window with the first access.
	Sequential
	// Random reads nothing ahead.
	Random
)

// Stream watches the accesses of one mapping. The zero Stream has seen none. Calls must not overlap.
type Stream struct {
	next   page.Index // where the last access ended
	ahead  page.Index // where the last window ended
	window int64      // pages, 0 while no stream is known
	seen   bool
}

// Access says that the program accesses rg, and returns the pages to read ahead of it, which follow rg and were not
// returned before; empty for none.
func (s *Stream) Access(rg page.Range, p Pattern) page.Range {
	if p == Random || rg.Empty() {
		*s = Stream{}
		return page.Range{}
	}
	follows := s.seen && rg.Start == s.next
	s.seen, s.next = true, rg.End
	switch {
	case follows && s.window > 0:
		s.window = min(2*s.window, MaxWindow)
	case follows:
		s.window = max(MinWindow, min(2*rg.Len(), MaxWindow))
	case p == Sequential:
		s.window, s.ahead = MinWindow, rg.End
	default:
		s.window, s.ahead = 0, rg.End
		return page.Range{}
	}
	start := max(s.ahead, rg.End)
	// A window that is more than half unread is enough for now.
	if int64(start-rg.End) > s.window/2 {
		return page.Range{}
	}
	s.ahead = rg.End + page.Index(s.window)
	return page.Range{Start: start, End: s.ahead}
}
