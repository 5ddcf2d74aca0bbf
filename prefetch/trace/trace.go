package trace

import (
	"errors"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/prefetch"
)

// Version is the version of the format that is written, and the only one that is read.
const Version = 1

const (
	magic      = "gaiatrac"
	headerSize = 32
	// blockSize is the bytes of records after which a block is closed; maxBlock is the most that a reader takes.
	blockSize = 64 << 10
	maxBlock  = 1 << 20
	// maxName bounds a file's name.
	maxName = 4096
	// maxTook bounds how long an access lasted, in nanoseconds.
	maxTook = 1 << 61
)

// The limits of what a trace can say.
const (
	// MaxLen is the most bytes of one access: 1 TiB.
	MaxLen = 1 << 40
	// MaxEnd is the largest end of an access and the largest size of a file.
	MaxEnd = 1 << 62
	// MaxEvents is the most events that are read.
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

// CPU is the Device of a Source that is a program on the CPU.
const CPU = -1

// File is a file that was accessed. Its number is its place in Trace.Files.
type File struct {
	Name string // path below the mountpoint
	Size int64  // bytes, when it was first accessed
}

// Source is a program that made accesses. Its number is its place in Trace.Sources.
type Source struct {
	Device int    // the number of the device that the bytes were for, or CPU
	Thread uint32 // a number that the kernel, or a generator, has for the thread or the process
}

func (s Source) String() string {
	if s.Device == CPU {
		return fmt.Sprintf("cpu:%d", s.Thread)
	}
	return fmt.Sprintf("gpu%d:%d", s.Device, s.Thread)
}

// Event is an access, a change of bytes where Write says so, or a change of a file's size where Resize does.
type Event struct {
	// Time is when it began, from the start of the trace, and Took how long it lasted.
	Time, Took   time.Duration
	File, Source uint32
	// Off and Len are in bytes. Of a change of size, Len is the new size.
	Off, Len int64
	Pattern  prefetch.Pattern
	Resize   bool
	// Write says that a device's program changed the bytes, as was found when it released them.
	Write bool
}

// Access reports whether x is an access.
func (x *Event) Access() bool { return !x.Resize && !x.Write }

// Trace is what was recorded.
type Trace struct {
	Start   time.Time
	Files   []File
	Sources []Source
	Events  []Event
	// Lost is the number of events that came faster than they were taken, and are not in Events.
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

// What is wrong with a trace that cannot be read; errors of Read wrap one of them.
var (
	ErrFormat  = errors.New("not a trace of gaiafs")
	ErrVersion = errors.New("a trace of another version")
	ErrCut     = errors.New("cut short")
	ErrCorrupt = errors.New("damaged")
)
