package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"
	"unicode/utf8"

	"github.com/gaiafs/gaiafs/prefetch"
)

// Read reads a whole trace. If it is truncated or damaged, Read returns the part before that, and an error that wraps
// ErrCut or ErrCorrupt. The trace is nil if not even the header can be read. Errors of r are returned as they are.
func Read(r io.Reader) (*Trace, error) {
	head := make([]byte, headerSize)
	if n, err := io.ReadFull(r, head); err != nil {
		switch {
		case !ended(err):
			return nil, err
		case n >= len(magic) && string(head[:len(magic)]) == magic:
			return nil, fmt.Errorf("%w within its header", ErrCut)
		}
		return nil, ErrFormat
	}
	if string(head[:len(magic)]) != magic {
		return nil, ErrFormat
	}
	if v := binary.LittleEndian.Uint32(head[8:]); v != Version {
		return nil, fmt.Errorf("%w: it has version %d, but this gaiafs reads %d", ErrVersion, v, Version)
	}
	if crc32.Checksum(head[:28], castagnoli) != binary.LittleEndian.Uint32(head[28:]) {
		return nil, fmt.Errorf("%w: its header does not fit its checksum", ErrCorrupt)
	}
	d := &decoder{t: &Trace{Start: time.Unix(0, int64(binary.LittleEndian.Uint64(head[16:])))}}
	err := d.blocks(r)
	if err != nil && !errors.Is(err, ErrCut) && !errors.Is(err, ErrCorrupt) {
		return nil, err
	}
	return d.t, err
}

func ended(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

// decoder reads records.
type decoder struct {
	t     *Trace
	last  time.Duration
	ended bool
	block []byte // the rest of the block's records
	bad   bool   // a number could not be read
}

func (d *decoder) blocks(r io.Reader) error {
	cut := func() error { return fmt.Errorf("%w after %d accesses", ErrCut, d.t.Accesses()) }
	var buf []byte
	for {
		var head [8]byte
		n, err := io.ReadFull(r, head[:])
		switch {
		case err != nil && !ended(err):
			return err
		case err != nil && n == 0 && d.ended:
			return nil
		case d.ended:
			return fmt.Errorf("%w: something follows its end", ErrCorrupt)
		case err != nil:
			return cut()
		}
		size := binary.LittleEndian.Uint32(head[:])
		if size == 0 || size > maxBlock {
			return fmt.Errorf("%w after %d accesses: a block of %d bytes", ErrCorrupt, d.t.Accesses(), size)
		}
		if uint32(cap(buf)) < size {
			buf = make([]byte, size)
		}
		buf = buf[:size]
		if _, err := io.ReadFull(r, buf); err != nil {
			if ended(err) {
				return cut()
			}
			return err
		}
		if crc32.Checksum(buf, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
			return fmt.Errorf("%w after %d accesses: a block does not fit its checksum", ErrCorrupt, d.t.Accesses())
		}
		d.block = buf
		for len(d.block) > 0 {
			if err := d.record(); err != nil {
				return fmt.Errorf("%w after %d accesses: %w", ErrCorrupt, d.t.Accesses(), err)
			}
		}
	}
}

// number reads a number that is at most most.
func (d *decoder) number(most uint64) uint64 {
	v, n := binary.Uvarint(d.block)
	if n <= 0 || v > most {
		d.bad = true
		return 0
	}
	d.block = d.block[n:]
	return v
}

// time reads a time, which is encoded as the difference from the previous one.
func (d *decoder) time() time.Duration {
	t, ok := addTime(d.last, unfold(d.number(1<<63-1)))
	d.bad = d.bad || !ok
	d.last = t
	return t
}

func (d *decoder) record() error {
	kind := d.block[0]
	d.block = d.block[1:]
	if d.ended {
		return errors.New("a record after the end")
	}
	t := d.t
	switch kind {
	case recordFile:
		f := File{Size: int64(d.number(MaxEnd))}
		n := int(d.number(maxName))
		if d.bad || n > len(d.block) {
			return errors.New("a file's name")
		}
		f.Name = string(d.block[:n])
		if !utf8.ValidString(f.Name) {
			f.Name = fmt.Sprintf("%q", f.Name)
		}
		d.block = d.block[n:]
		t.Files = append(t.Files, f)
	case recordSource:
		t.Sources = append(t.Sources, Source{Device: int(d.number(1<<16)) - 1, Thread: uint32(d.number(1<<32 - 1))})
	case recordAccess:
		x := Event{
			File:    uint32(d.number(1<<32 - 1)),
			Source:  uint32(d.number(1<<32 - 1)),
			Pattern: prefetch.Pattern(d.number(uint64(prefetch.Random))),
			Time:    d.time(),
			Took:    time.Duration(d.number(maxTook)),
			Off:     int64(d.number(MaxEnd)),
			Len:     int64(d.number(MaxLen)),
		}
		if d.bad || x.Len == 0 || x.Off+x.Len > MaxEnd || int(x.File) >= len(t.Files) ||
			int(x.Source) >= len(t.Sources) {
			return errors.New("an access")
		}
		t.Events = append(t.Events, x)
	case recordWrite:
		x := Event{
			File: uint32(d.number(1<<32 - 1)), Source: uint32(d.number(1<<32 - 1)), Time: d.time(),
			Off: int64(d.number(MaxEnd)), Len: int64(d.number(MaxLen)), Write: true,
		}
		if d.bad || x.Len == 0 || x.Off+x.Len > MaxEnd || int(x.File) >= len(t.Files) ||
			int(x.Source) >= len(t.Sources) {
			return errors.New("a write")
		}
		t.Events = append(t.Events, x)
	case recordResize:
		x := Event{File: uint32(d.number(1<<32 - 1)), Time: d.time(), Len: int64(d.number(MaxEnd)), Resize: true}
		if d.bad || int(x.File) >= len(t.Files) {
			return errors.New("a change of size")
		}
		t.Events = append(t.Events, x)
	case recordLost:
		t.Lost += d.number(1 << 48)
	case recordEnd:
		if n := d.number(1<<63 - 1); !d.bad && n != uint64(len(t.Events)) {
			return fmt.Errorf("%d events are there, not %d", len(t.Events), n)
		}
		d.ended = true
	default:
		return fmt.Errorf("a record of kind %d", kind)
	}
	if d.bad {
		return fmt.Errorf("a number in a record of kind %d", kind)
	}
	if len(t.Events) > MaxEvents {
		return fmt.Errorf("more than %d events", MaxEvents)
	}
	return nil
}
