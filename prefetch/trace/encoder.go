package trace

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"time"

	"github.com/gaiafs/gaiafs/prefetch"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encoder writes a trace. Files and sources are numbered from 0, in the order of the calls of File and Source. Call
// Take now and then, and after End, to get the bytes. Calls must not overlap.
type Encoder struct {
	done   []byte // header and closed blocks
	block  []byte // payload of the open block
	last   time.Duration
	events uint64

	files, sources uint32
}

// NewEncoder begins a trace that starts at the given time.
func NewEncoder(start time.Time) *Encoder {
	e := &Encoder{}
	e.done = append(e.done, magic...)
	e.done = binary.LittleEndian.AppendUint32(e.done, Version)
	e.done = binary.LittleEndian.AppendUint32(e.done, 0)
	e.done = binary.LittleEndian.AppendUint64(e.done, uint64(start.UnixNano()))
	e.done = binary.LittleEndian.AppendUint32(e.done, 0)
	e.done = binary.LittleEndian.AppendUint32(e.done, crc32.Checksum(e.done, castagnoli))
	return e
}

// File declares a file and returns its number. Names are cut to 4096 bytes.
func (e *Encoder) File(f File) uint32 {
	name := f.Name[:min(len(f.Name), maxName)]
	e.record(recordFile, uint64(clamp(f.Size, 0, MaxEnd)), uint64(len(name)))
	e.block = append(e.block, name...)
	e.files++
	return e.files - 1
}

// Source declares a source and returns its number.
func (e *Encoder) Source(s Source) uint32 {
	e.record(recordSource, uint64(s.Device+1), uint64(s.Thread))
	e.sources++
	return e.sources - 1
}

// Event adds an event. An access or a write that is longer than MaxLen becomes several; one that ends past MaxEnd is
// cut there. An event without bytes, or of an undeclared file or source, is ignored.
func (e *Encoder) Event(x Event) {
	if x.File >= e.files || x.Off < 0 {
		return
	}
	if x.Resize {
		e.record(recordResize, uint64(x.File), e.since(x.Time), uint64(clamp(x.Len, 0, MaxEnd)))
		e.events++
		return
	}
	if x.Source >= e.sources {
		return
	}
	for left := min(x.Len, MaxEnd-x.Off); left > 0; {
		n := min(left, MaxLen)
		if x.Write {
			e.record(recordWrite, uint64(x.File), uint64(x.Source), e.since(x.Time), uint64(x.Off), uint64(n))
			e.events++
			x.Off, left = x.Off+n, left-n
			continue
		}
		e.record(recordAccess, uint64(x.File), uint64(x.Source), uint64(min(x.Pattern, prefetch.Random)),
			e.since(x.Time),
			uint64(clamp(int64(x.Took), 0, maxTook)),
			uint64(x.Off), uint64(n))
		e.events++
		x.Off, left = x.Off+n, left-n
	}
}

// Lost notes that n events are missing here.
func (e *Encoder) Lost(n uint64) { e.record(recordLost, n) }

// End ends the trace.
func (e *Encoder) End() {
	e.record(recordEnd, e.events)
	e.close()
}

// Pending returns the number of bytes that Take would return.
func (e *Encoder) Pending() int { return len(e.done) }

// Take returns the bytes since the last call, except those of the open block. The caller owns them.
func (e *Encoder) Take() []byte {
	b := e.done
	e.done = nil
	return b
}

// Flush closes the open block, so that Take returns everything.
func (e *Encoder) Flush() { e.close() }

// since returns the time since the last event, which may be negative, folded into an unsigned number.
func (e *Encoder) since(t time.Duration) uint64 {
	d := int64(t - e.last)
	e.last = t
	return uint64(d)<<1 ^ uint64(d>>(64-1))
}

func (e *Encoder) record(kind byte, numbers ...uint64) {
	if len(e.block) >= blockSize {
		e.close()
	}
	e.block = append(e.block, kind)
	for _, n := range numbers {
		e.block = binary.AppendUvarint(e.block, n)
	}
}

func (e *Encoder) close() {
	if len(e.block) == 0 {
		return
	}
	e.done = binary.LittleEndian.AppendUint32(e.done, uint32(len(e.block)))
	e.done = binary.LittleEndian.AppendUint32(e.done, crc32.Checksum(e.block, castagnoli))
	e.done = append(e.done, e.block...)
	e.block = e.block[:0]
}

func clamp(v, low, high int64) int64 { return min(max(v, low), high) }

// Encode returns a whole trace as bytes.
func Encode(t *Trace) []byte {
	e := NewEncoder(t.Start)
	for _, f := range t.Files {
		e.File(f)
	}
	for _, s := range t.Sources {
		e.Source(s)
	}
	for _, x := range t.Events {
		e.Event(x)
	}
	if t.Lost > 0 {
		e.Lost(t.Lost)
	}
	e.End()
	return e.Take()
}

// unfold is the inverse of the folding in since.
func unfold(n uint64) time.Duration { return time.Duration(n>>1) ^ -time.Duration(n&1) }

// addTime adds without overflow. It reports whether the sum is plausible: a damaged or hostile trace may have any
// times.
func addTime(a, b time.Duration) (time.Duration, bool) {
	s := a + b
	return s, s >= 0 && (b < 0 || s >= a) && s <= math.MaxInt64/4
}
