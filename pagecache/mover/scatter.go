package mover

import (
	"sort"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Segment is bytes of a file and where they go: Len bytes of home at Off, to At in Mem. None of the numbers needs to be
// aligned.
type Segment struct {
	Off int64
	Mem gpubackend.Memory
	At  int64
	Len int64
}

// Scatter is the Target of a Fill whose bytes go to places of their own: a packed or strided copy of some bytes of a
// file. Each page is read once, whatever number of segments begins or ends in it. What lies past the end of home is
// zero.
//
// Nobody may be storing into the segments' memory. Done of each Piece says what has arrived.
type Scatter struct {
	segments []Segment
	// ends has the largest end of the segments up to each: segments may overlap in the file.
	ends []int64
}

// NewScatter returns a Target for segments that are in file order. It keeps segments, and segments of no length are
// allowed.
func NewScatter(segments []Segment) *Scatter {
	s := &Scatter{segments: segments, ends: make([]int64, len(segments))}
	end := int64(0)
	for i, p := range segments {
		end = max(end, p.Off+p.Len)
		s.ends[i] = end
	}
	return s
}

// Pieces returns what a Fill has to read. spans are those of reads that go on already (Reads.Spans), nil if there are
// none.
func (s *Scatter) Pieces(spans []page.Range) []Piece {
	var runs []page.Range
	for _, p := range s.segments {
		rg := page.Span(p.Off, p.Len).Pages()
		if n := len(runs); n > 0 {
			rg.Start = max(rg.Start, runs[n-1].End)
		}
		if p.Len > 0 && !rg.Empty() {
			runs = page.AppendRange(runs, rg)
		}
	}
	if len(runs) == 0 {
		return nil
	}
	all := page.Range{Start: runs[0].Start, End: runs[len(runs)-1].End}
	return Pieces(len(runs), func(i int) Update { return Update{Pages: runs[i]} }, []Run{{Pages: all}}, spans)
}

// Placer implements Target.
func (s *Scatter) Placer() Placer { return s }

// AppendCopies implements Placer.
func (s *Scatter) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	from, to := pages.Offset(), pages.Offset()+int64(len(buf))
	first := sort.Search(len(s.ends), func(i int) bool { return s.ends[i] > from })
	for _, p := range s.segments[first:] {
		if p.Off >= to {
			break
		}
		lo, hi := max(p.Off, from), min(p.Off+p.Len, to)
		if lo < hi {
			list = append(list, gpubackend.Copy{Mem: p.Mem, Off: p.At + lo - p.Off, Host: buf[lo-from : hi-from]})
		}
	}
	return list
}

// AppendPatches implements Placer. Nothing of a Scatter is patched.
func (s *Scatter) AppendPatches([]gpubackend.Patch, *Step, []byte, []gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("mover: a patch of scattered bytes")
}

// Settle implements Target.
func (s *Scatter) Settle([]*Piece) {}
