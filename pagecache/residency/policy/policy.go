package policy

import (
	"fmt"
	"iter"
	"time"
)

// ID names an extent. An extent that comes back after Left keeps its ID.
type ID uint64

// Program names something whose brackets take similar times, for example a client.
type Program uint64

// Kind is the kind of an Event.
type Kind uint8

const (
	// Placed: the extent got memory. It may leave.
	Placed Kind = iota
	// Mapped: the extent may not leave from now on, because the first client maps it, or the first bracket uses it.
	Mapped
	// Unmapped: the extent may leave again.
	Unmapped
	// Kept: the mapped extent may leave again once clients are asked to end the brackets that they keep. Mapped and
	// Unmapped end this.
	Kept
	// Left: the extent gave its memory back. It may come back.
	Left
	// Accessed: Bytes of the extent were accessed; with Write, some of them were changed. The extent need not have
	// memory.
	Accessed
	// Forgotten: an extent without memory never comes back.
	Forgotten
	// Began and Ended: a bracket of Program began or ended, at the time At.
	Began
	Ended
)

var kindWords = [...]string{
	Placed: "placed", Mapped: "mapped", Unmapped: "unmapped", Kept: "kept", Left: "left", Accessed: "accessed",
	Forgotten: "forgotten",
	Began:     "began", Ended: "ended",
}

func (k Kind) String() string { return kindWords[k] }

// Event tells a Rule what happened.
type Event struct {
	Kind Kind
	// ID is the extent's; 0 in Began and Ended.
	ID ID
	// Bytes is the size of the extent in Placed, and the number of bytes accessed in Accessed.
	Bytes int64
	// Priority is the extent's priority in Placed, as its owner sets it. Rules that use priorities evict lower ones
	// first.
	Priority int
	// Write means that some of the accessed bytes were changed.
	Write bool
	// Claimed is how many accesses a program says there were, if nobody saw them one by one. They fill a counter by
	// half at most. 0: one access, which was seen.
	Claimed uint32
	// Program and At describe a bracket. At counts from any fixed moment.
	Program Program
	At      time.Duration
}

func (e Event) String() string {
	switch e.Kind {
	case Began, Ended:
		return fmt.Sprintf("%s %d %v", e.Kind, e.Program, e.At)
	}
	s := fmt.Sprintf("%s %d", e.Kind, e.ID)
	if e.Bytes != 0 {
		s += fmt.Sprintf(" bytes=%d", e.Bytes)
	}
	if e.Priority != 0 {
		s += fmt.Sprintf(" priority=%d", e.Priority)
	}
	if e.Write {
		s += " write"
	}
	if e.Claimed != 0 {
		s += fmt.Sprintf(" claimed=%d", e.Claimed)
	}
	return s
}

// Rule chooses victims.
type Rule interface {
	// Note tells the Rule of an event.
	Note(e Event)
	// Victims yields the extents that may leave, in order. Note must not be called meanwhile.
	Victims() iter.Seq[ID]
}

// Counter is a Rule that counts accesses.
type Counter interface {
	Rule
	// Colder yields the kept extents that would go before the given one, as far as accesses are known. They come in no
	// order. Note must not be called meanwhile.
	Colder(than ID) iter.Seq[ID]
}

// Options of rules.
type Options struct {
	// Seed seeds the random rules.
	Seed uint64
	// ReadOnlyFirst evicts extents first that were not written to since they were placed.
	ReadOnlyFirst bool
}

// Default is the name of the default rule.
const Default = "allocated"
