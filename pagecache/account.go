package pagecache

import "sync/atomic"

// account is the host memory of a Cache that grows with the work of others. It bounds what can be given back: who needs
// more than there is room for gives some back first. Page states and digests are what devices hold pages by; the more
// they take, the less is left for the rest.
type account struct {
	limit   int64 // immutable
	total   atomic.Int64
	classes [classes]atomic.Int64
}

// class is what memory is for.
type class uint8

const (
	// memoryBases is base copies and where they are found.
	memoryBases class = iota
	// memoryClean is pages that were read ahead from devices for programs on the CPU.
	memoryClean
	// memoryStates is versions and page states.
	memoryStates
	// memoryDigests is the digests of tracked pages.
	memoryDigests
	// memoryViews is the lists of segments of views, and what is stale of them.
	memoryViews
	// memoryGroups is the ranges of open groups.
	memoryGroups
	// memoryFlights is released bytes that readers see and home is still to get.
	memoryFlights
	classes
)

func (c class) String() string {
	return [...]string{"bases", "clean", "states", "digests", "views", "groups", "flights"}[c]
}

// charge adds n bytes, which may be negative.
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

// MemoryStatus is the host memory that grows with what programs do.
type MemoryStatus struct {
	LimitBytes int64 `json:"limit_bytes"`
	UsedBytes  int64 `json:"used_bytes"`
	// Classes has the bytes of UsedBytes by what they are for.
	Classes map[string]int64 `json:"classes"`
}

func (a *account) status() MemoryStatus {
	s := MemoryStatus{LimitBytes: a.limit, UsedBytes: a.total.Load(), Classes: make(map[string]int64, classes)}
	for c := range classes {
		s.Classes[c.String()] = a.classes[c].Load()
	}
	return s
}
