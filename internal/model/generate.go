package model

import "math/rand/v2"

// weights is how often a random program uses each operation. Between a Publish and its Finish, any program may take
// steps.
var weights = [numOps]int{
	Write: 12, MapStore: 12, Read: 12, DirectRead: 4, Fsync: 2, Truncate: 2, Punch: 2, Flush: 4, Reclaim: 3,
	Append: 2, DirectWrite: 2, OpenTrunc: 1, Allocate: 1, Zero: 2, PunchRest: 1, SeekRead: 2, Copy: 2, CopyOut: 1,
	Stat: 8, SetTimes: 3, Chmod: 2, Reopen: 6, Unlink: 1,
	SourceWrite: 6, SourceAppend: 4, SourceTruncate: 2, SourcePunch: 2, SourceCollapse: 1, SourceInsert: 1,
	SourceClone: 2, SourceSnapshot: 2, SourceChmod: 3, SourceLink: 3, SourceRename: 2,
	Map: 12, Unmap: 2, Kill: 1, Store: 30, Load: 12, Acquire: 14, Release: 10, Publish: 8, Drop: 6, Finish: 6,
	DontNeed: 1, Peek: 6, Evict: 3, Collect: 4, Untrack: 2, Group: 6,
	Use: 30, Done: 24,
	View: 6, Look: 12, Unview: 2,
}

// Source supplies the numbers of random programs: IntN returns one in [0, n).
type Source interface{ IntN(n int) int }

// NewSource returns the Source for a seed.
func NewSource(seed uint64) Source { return rand.New(rand.NewPCG(seed, 0x6761696166730a)) }

// Random returns a random step, which need not be Legal. It uses only operations that ops accepts; nil accepts those
// that are Exact.
func (l Layout) Random(r Source, ops func(Op) bool) Step {
	var s Step
	if ops == nil {
		ops = Op.Exact
	}
	total := 0
	for op, w := range weights {
		if ops(Op(op)) {
			total += w
		}
	}
	n := r.IntN(total)
	for op, w := range weights {
		if !ops(Op(op)) {
			continue
		}
		if n -= w; n < 0 {
			s.Op = Op(op)
			break
		}
	}
	if s.Op.byCPU() {
		s.Client = Client(r.IntN(l.CPUs))
	} else {
		s.Client = Client(l.CPUs + r.IntN(len(l.GPUs)))
	}
	s.Writable, s.Lazy = r.IntN(4) > 0, r.IntN(6) == 0
	s.Keep = r.IntN(2) == 0
	s.Val, s.Same = byte(r.IntN(256)), false
	if r.IntN(5) == 0 {
		s.Val, s.Same = byte(r.IntN(2)), true
	}
	s.Movable = ops(Use) && s.Val%8 > 0
	// Most steps use the first two pages. The other pages make longer runs of pages possible.
	p := int64(r.IntN(l.Pages))
	if r.IntN(3) > 0 {
		p = int64(r.IntN(min(2, l.Pages)))
	}
	limit := int64(l.Pages) * PageSize
	switch {
	case s.Op.hasLength():
		s.Len = []int64{int64(1 + r.IntN(9)), int64(1 + r.IntN(2*PageSize))}[r.IntN(2)]
		return s
	case s.Op.hasOffset():
		s.Off = []int64{p * PageSize, p*PageSize + int64(spots[r.IntN(len(spots))]), limit}[r.IntN(3)]
		return s
	case !s.Op.hasRange():
		return s
	case s.Op == Map && r.IntN(2) == 0:
		s.Off, s.Len = 0, limit
	case s.Op.OfViews():
		s.Off, s.Len = p*PageSize+int64(r.IntN(PageSize)), int64(1+r.IntN(3*PageSize))
	case s.Op.wholePages():
		s.Off, s.Len = p*PageSize, int64(1+r.IntN(3))*PageSize
	case r.IntN(8) == 0:
		s.Off, s.Len = p*PageSize, int64(1+r.IntN(2))*PageSize
	case r.IntN(8) == 0:
		s.Off, s.Len = p*PageSize+int64(r.IntN(PageSize)), int64(1+r.IntN(2*PageSize))
	default:
		s.Off, s.Len = p*PageSize+int64(spots[r.IntN(len(spots))]), int64(1+r.IntN(9))
	}
	s.Len = min(s.Len, limit-s.Off)
	if s.Op == Copy {
		s.From = int64(r.IntN(l.Pages))*PageSize + []int64{0, int64(spots[r.IntN(len(spots))])}[r.IntN(2)]
	}
	return s
}
