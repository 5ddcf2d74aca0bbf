package pagecache

import "sync/atomic"

// account tracks the host memory of a Cache that grows with use. The limit applies to memory that can be given back: a
// caller that needs more than is left frees some first. Page states and digests cannot be given back while devices hold
// the pages. The more they take, the less is left for the other classes.
type account struct {
	limit   int64 // immutable
	total   atomic.Int64
	classes [classes]atomic.Int64
}

// class says what memory is used for.
type class uint8

const (
	// memoryBases is base copies and their index.
	memoryBases class = iota
	// memoryClean is pages read ahead from devices for programs on the CPU.
	memoryClean
	// memoryStates is versions and page states.
	memoryStates
	// memoryDigests is the digests of tracked pages.
	memoryDigests
	// memoryViews is the segment lists of views, and the record of their stale bytes.
	memoryViews
	// memoryGroups is the ranges of open groups.
	memoryGroups
	// memoryFlights is released bytes that readers see before home has them.
	memoryFlights
	classes
)

func (c class) String() string {
	return [...]string{"bases", "clean", "states", "digests", "views", "groups", "flights"}[c]
}

// charge adds n bytes to class c; n may be negative.
func (a *account) charge(c class, n int64) {
	if n != 0 {
		a.classes[c].Add(n)
		a.total.Add(n)
	}
}

// fits reports whether there is room for n more bytes.
func (a *account) fits(n int64) bool { return a.total.Load()+n <= a.limit }

// left returns how many more bytes there is room for.
func (a *account) left() int64 { return max(a.limit-a.total.Load(), 0) }

// MemoryStatus describes the host memory that grows with what programs do.
type MemoryStatus struct {
	LimitBytes int64 `json:"limit_bytes"`
	UsedBytes  int64 `json:"used_bytes"`
	// Classes splits UsedBytes by use.
	Classes map[string]int64 `json:"classes"`
}

func (a *account) status() MemoryStatus {
	s := MemoryStatus{LimitBytes: a.limit, UsedBytes: a.total.Load(), Classes: make(map[string]int64, classes)}
	for c := range classes {
		s.Classes[c.String()] = a.classes[c].Load()
	}
	return s
}
