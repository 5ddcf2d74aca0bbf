package view

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"sort"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Limits of a Layout. MaxSize is the limit of a view's size, in bytes.
const (
	MaxSegments  = 1 << 19
	MaxFiles     = 1 << 14
	MaxRows      = 1 << 24
	MaxAlignment = 2 << 20
	MaxSize      = 1 << 62
)

// ErrTooFar says that a segment ends past the largest file offset.
var ErrTooFar = errors.New("it ends past the largest file")

// Segment is Count rows of Length bytes of a file. The first row begins at Offset, each next one Stride bytes after the
// start of the one before it. Stride matters only if there are several rows.
type Segment struct {
	File                          int
	Offset, Length, Stride, Count int64
}

// bytes returns the number of bytes of the segment in the view.
func (s *Segment) bytes() int64 { return s.Length * s.Count }

// span returns the range of the file from the first to the last byte of the segment.
func (s *Segment) span() page.Bytes {
	return page.Span(s.Offset, s.stride()*(s.Count-1)+s.Length)
}

// stride returns the distance between rows; for a single row, its length.
func (s *Segment) stride() int64 {
	if s.Count == 1 {
		return s.Length
	}
	return s.Stride
}

// rows returns the numbers [first, end) of the rows that have bytes in b.
func (s *Segment) rows(b page.Bytes) (first, end int64) {
	if b = b.Intersect(s.span()); b.Empty() {
		return 0, 0
	}
	first = (b.Off - s.Offset) / s.stride()
	if s.Offset+first*s.stride()+s.Length <= b.Off {
		first++ // b begins in the gap behind that row
	}
	return first, min((b.End-1-s.Offset)/s.stride()+1, s.Count)
}

// check returns an error if the segment is invalid.
func (s *Segment) check(files int) error {
	switch {
	case s.File < 0 || s.File >= files:
		return fmt.Errorf("there is no file %d", s.File)
	case s.Offset < 0:
		return fmt.Errorf("its offset is %d: %w", uint64(s.Offset), ErrTooFar)
	case s.Length <= 0:
		return fmt.Errorf("the length %d is not positive", s.Length)
	case s.Count <= 0:
		return fmt.Errorf("the count %d is not positive", s.Count)
	case s.Count > MaxRows:
		return fmt.Errorf("it has %d rows; at most %d are allowed", s.Count, MaxRows)
	case s.Count > 1 && s.Stride < s.Length:
		return fmt.Errorf("the stride %d is less than the length %d of a row", s.Stride, s.Length)
	case s.Count > 1 && s.Stride > (math.MaxInt64-s.Length)/(s.Count-1):
		return ErrTooFar
	case s.Offset > math.MaxInt64-(s.stride()*(s.Count-1)+s.Length):
		return ErrTooFar
	}
	return nil
}

// Layout says where segments are in their files and in the view. It is immutable.
type Layout struct {
	segments []Segment
	starts   []int64 // of the segments in the view, ascending
	size     int64
	files    []File
}

// New returns the layout of segments of so many files at an alignment. It keeps the slice. An error says that the
// request is invalid; it may wrap ErrTooFar.
func New(files int, segments []Segment, alignment int64) (*Layout, error) {
	switch {
	case files < 1 || files > MaxFiles:
		return nil, fmt.Errorf("a view of %d files; it has 1 to %d", files, MaxFiles)
	case len(segments) < 1 || len(segments) > MaxSegments:
		return nil, fmt.Errorf("a view of %d segments; it has 1 to %d", len(segments), MaxSegments)
	case alignment < 1 || alignment > MaxAlignment || alignment&(alignment-1) != 0:
		return nil, fmt.Errorf("the alignment %d is not a power of two from 1 to %d", alignment, MaxAlignment)
	}
	l := &Layout{segments: segments, starts: make([]int64, len(segments)), files: make([]File, files)}
	rows := int64(0)
	for i := range segments {
		s := &segments[i]
		if err := s.check(files); err != nil {
			return nil, fmt.Errorf("segment %d: %w", i, err)
		}
		if rows += s.Count; rows > MaxRows {
			return nil, fmt.Errorf("segment %d: the view has more than %d rows up to here", i, MaxRows)
		}
		start := (l.size + alignment - 1) &^ (alignment - 1)
		if start > MaxSize-alignment || s.bytes() > MaxSize-start {
			return nil, fmt.Errorf("segment %d: the view is larger than 2^62 bytes", i)
		}
		l.starts[i], l.size = start, start+s.bytes()
		l.files[s.File].order = append(l.files[s.File].order, int32(i))
	}
	for i := range l.files {
		l.files[i].index(l, i)
	}
	return l, nil
}

// Size returns the size of the view in bytes.
func (l *Layout) Size() int64 { return l.size }

// Memory returns roughly the host memory of the Layout and of the States of its files, in bytes. It does not count page
// sets of sections that are stale in part.
func (l *Layout) Memory() int64 {
	n := int64(len(l.segments)) * int64(unsafe.Sizeof(Segment{})+8)
	for i := range l.files {
		n += int64(len(l.files[i].order))*4 + int64(len(l.files[i].ends))*8 + l.files[i].mostSections()*stateSection
	}
	return n
}

// Segments returns the segments. The caller must not change them.
func (l *Layout) Segments() []Segment { return l.segments }

// File returns the part of the view that comes from file i.
func (l *Layout) File(i int) *File { return &l.files[i] }

// Sources yields the files, and the bytes of each, that bytes of the view come from. It yields one range per segment,
// which may cover gaps between rows. Ranges of one file may overlap, and come in no order.
func (l *Layout) Sources(view page.Bytes) iter.Seq2[int, page.Bytes] {
	return func(yield func(int, page.Bytes) bool) {
		i := sort.Search(len(l.segments), func(i int) bool { return l.starts[i]+l.segments[i].bytes() > view.Off })
		for ; i < len(l.segments) && l.starts[i] < view.End; i++ {
			s := &l.segments[i]
			part := page.Bytes{Off: max(view.Off-l.starts[i], 0), End: min(view.End-l.starts[i], s.bytes())}
			first, last := part.Off/s.Length, (part.End-1)/s.Length
			from := s.Offset + first*s.stride()
			to := s.Offset + last*s.stride() + s.Length
			if first == last {
				from, to = from+part.Off%s.Length, from+(part.End-1)%s.Length+1
			}
			if !yield(s.File, page.Bytes{Off: from, End: to}) {
				return
			}
		}
	}
}
