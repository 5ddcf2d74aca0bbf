package policy

import (
	"fmt"
	"iter"
)

// ID names an extent for as long as it is on its device. IDs are not used again.
type ID uint64

// Kind is what happened to an extent.
type Kind uint8

const (
	// Placed says that the extent was given memory. Nobody maps it yet.
	Placed Kind = iota
	// Mapped says that the first client maps it.
	Mapped
	// Unmapped says that the last client unmapped it.
	Unmapped
	// Left says that it gives its memory back. It is the last event of an extent.
	Left
)

var kindWords = [...]string{Placed: "placed", Mapped: "mapped", Unmapped: "unmapped", Left: "left"}

func (k Kind) String() string { return kindWords[k] }

// Event is what a Rule is told.
type Event struct {
	Kind Kind
	ID   ID
	// Bytes is the size of the extent, in the Placed event.
	Bytes int64
}

func (e Event) String() string { return fmt.Sprintf("%s %d", e.Kind, e.ID) }

// Rule chooses victims.
type Rule interface {
	// Note tells the Rule what happened.
	Note(e Event)
	// Victims yields the extents that nobody maps, the first to go first. Nobody calls Note meanwhile.
	Victims() iter.Seq[ID]
}

// Default is the name of the rule that is used where nobody asks for another one.
const Default = "allocated"

// Rules makes each rule by its name.
var Rules = map[string]func() Rule{
	"allocated": newAllocated,
}
