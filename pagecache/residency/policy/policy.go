package policy

import (
	"fmt"
	"iter"
	"time"
)

// ID names an extent. One that comes back after it Left has the ID that it had.
type ID uint64

// Program names what begins brackets, a client for example, whose brackets take similar times.
type Program uint64

// Kind is what happened.
type Kind uint8

const (
	// Placed says that the extent was given memory. It may go.
	Placed Kind = iota
	// Mapped says that from now on it may not go: the first client maps it, or the first bracket uses it.
	Mapped
	// Unmapped says that it may go again.
	Unmapped
	// Left says that it gives its memory back. It may come back.
	Left
	// Accessed says that Bytes of it were accessed, with Write: that some of them were changed. It need not have
	// memory.
	Accessed
	// Forgotten says that an extent without memory never comes back.
	Forgotten
	// Began and Ended say that a bracket of Program began and ended, At those times.
	Began
	Ended
)

var kindWords = [...]string{
	Placed: "placed", Mapped: "mapped", Unmapped: "unmapped", Left: "left", Accessed: "accessed",
	Forgotten: "forgotten",
	Began:     "began", Ended: "ended",
}

func (k Kind) String() string { return kindWords[k] }

// Event is what a Rule is told.
type Event struct {
	Kind Kind
	// ID is the extent's; 0 in Began and Ended.
	ID ID
	// Bytes is the size of the extent in the Placed event, and what is accessed of it in Accessed.
	Bytes int64
	// Priority is what its owner says of the extent in the Placed event. Extents of lower ones go first, by rules that
	// look at it.
	Priority int
	// Write says that some of the accessed bytes were changed.
	Write bool
	// Program and At are those of a bracket. Times are counted from any fixed moment.
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
	return s
}

// Rule chooses victims.
type Rule interface {
	// Note tells the Rule what happened.
	Note(e Event)
	// Victims yields the extents that may go, the first to go first. Nobody calls Note meanwhile.
	Victims() iter.Seq[ID]
}

// Options of rules.
type Options struct {
	// Seed is what chance depends on.
	Seed uint64
	// ReadOnlyFirst has extents go first that nobody has written to since they were placed. The rule of chance does not
	// look at it.
	ReadOnlyFirst bool
}

// Default is the name of the rule that is used where nobody asks for another one.
const Default = "allocated"
