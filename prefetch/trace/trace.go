package trace

import (
	"errors"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/prefetch"
)

// Version is the version that is written, and the only one that can be read.
const Version = 1

const (
	magic      = "gaiatrac"
	headerSize = 32
	// blockSize is the size of records after which a block is closed. maxBlock is the largest block that a reader
	// accepts.
	blockSize = 64 << 10
	maxBlock  = 1 << 20
	// maxName bounds a file's name.
	maxName = 4096
	// maxTook bounds the duration of an access, in nanoseconds.
	maxTook = 1 << 61
)

// Limits of a trace.
const (
	// MaxLen is the largest length of an access in bytes: 1 TiB.
	MaxLen = 1 << 40
	// MaxEnd is the largest end of an access and the largest size of a file.
	MaxEnd = 1 << 62
	// MaxEvents is the largest number of events that Read accepts.
	MaxEvents = 1 << 26
)

// Kinds of records.
const (
	recordFile byte = iota + 1
	recordSource
	recordAccess
	recordResize
	recordLost
	recordEnd
	recordWrite
)

// CPU is the Device of a Source that is a CPU program.
const CPU = -1

// File is a file that was accessed. Its number is its index in Trace.Files.
type File struct {
	Name string // path below the mountpoint
	Size int64  // bytes, when it was first accessed
}

// Source is a program that made accesses. Its number is its index in Trace.Sources.
type Source struct {
	Device int    // number of the device that the bytes were for, or CPU
	Thread uint32 // the kernel's or a generator's number of the thread or process
}

func (s Source) String() string {
	if s.Device == CPU {
		return fmt.Sprintf("cpu:%d", s.Thread)
	}
	return fmt.Sprintf("gpu%d:%d", s.Device, s.Thread)
}

// Event is an access, a change of bytes (Write), or a change of a file's size (Resize).
type Event struct {
	// Time is when it began, since the start of the trace. Took is its duration.
	Time, Took   time.Duration
	File, Source uint32
	// Off and Len are in bytes. In a Resize, Len is the new size.
	Off, Len int64
	Pattern  prefetch.Pattern
	Resize   bool
	// Write means that a device's program changed the bytes; the release found that.
	Write bool
}

// Access reports whether x is an access.
func (x *Event) Access() bool { return !x.Resize && !x.Write }

// Trace is a recording.
type Trace struct {
	Start   time.Time
	Files   []File
	Sources []Source
	Events  []Event
	// Lost is the number of events that came too fast to be recorded, and are not in Events.
	Lost uint64
}

// Accesses returns the number of events that are accesses.
func (t *Trace) Accesses() (n int) {
	for i := range t.Events {
		if t.Events[i].Access() {
			n++
		}
	}
	return n
}

// Errors of Read wrap one of these, if the trace cannot be read.
var (
	ErrFormat  = errors.New("not a trace of gaiafs")
	ErrVersion = errors.New("a trace of another version")
	ErrCut     = errors.New("cut short")
	ErrCorrupt = errors.New("damaged")
)
