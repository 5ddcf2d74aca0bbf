package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/prefetch"
)

// example has every kind of record, and more than one block.
func example() *Trace {
	t := &Trace{
		Start:   time.Unix(1763700000, 123456789),
		Files:   []File{{"weights.bin", 1 << 30}, {"dir/näme", 0}},
		Sources: []Source{{CPU, 4242}, {0, 17}, {159, 0}},
		Lost:    3,
	}
	for i := range int64(20000) {
		t.Events = append(t.Events, Event{
			Time: time.Duration(i * 1000), Took: time.Duration(i % 7), File: uint32(i % 2), Source: uint32(i % 3),
			Off: i * 4096 * 31, Len: 1 + i%70000, Pattern: prefetch.Pattern(i % 3),
		})
	}
	t.Events[100].Time = 7 // earlier than the one before it
	t.Events[7] = Event{Time: 5, File: 1, Len: 12345, Resize: true}
	return t
}

func TestATraceComesBackAsItWas(t *testing.T) {
	b := Encode(example())
	got, err := Read(iotest.OneByteReader(bytes.NewReader(b)))
	require.NoError(t, err)
	require.Equal(t, example(), got)
	require.Equal(t, 19999, got.Accesses())
	require.Less(t, len(b), 15*20000, "bytes for an access")
}

func TestAnEmptyTraceIsATrace(t *testing.T) {
	got, err := Read(bytes.NewReader(Encode(&Trace{Start: time.Unix(1, 0)})))
	require.NoError(t, err)
	require.Empty(t, got.Events)
}

func TestAnyTraceComesBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &Trace{Start: time.Unix(0, rapid.Int64().Draw(t, "start"))}
		for range rapid.IntRange(1, 3).Draw(t, "files") {
			want.Files = append(want.Files, File{rapid.StringN(0, 20, 100).Draw(t, "name"),
				rapid.Int64Range(0, MaxEnd).Draw(t, "size")})
			want.Sources = append(want.Sources, Source{rapid.IntRange(CPU, 200).Draw(t, "device"),
				rapid.Uint32().Draw(t, "thread")})
		}
		for range rapid.IntRange(0, 20).Draw(t, "events") {
			x := Event{
				Time: time.Duration(rapid.Int64Range(0, 1<<60).Draw(t, "time")),
				File: uint32(rapid.IntRange(0, len(want.Files)-1).Draw(t, "file")),
			}
			if x.Resize = rapid.Bool().Draw(t, "resize"); x.Resize {
				x.Len = rapid.Int64Range(0, MaxEnd).Draw(t, "size")
			} else {
				x.Source = x.File
				if x.Write = rapid.Bool().Draw(t, "write"); !x.Write {
					x.Took = time.Duration(rapid.Int64Range(0, maxTook).Draw(t, "took"))
					x.Pattern = prefetch.Pattern(rapid.IntRange(0, 2).Draw(t, "pattern"))
				}
				x.Len = rapid.Int64Range(1, MaxLen).Draw(t, "len")
				x.Off = rapid.Int64Range(0, MaxEnd-x.Len).Draw(t, "off")
			}
			want.Events = append(want.Events, x)
		}
		got, err := Read(bytes.NewReader(Encode(want)))
		require.NoError(t, err)
		require.True(t, want.Start.Equal(got.Start))
		got.Start = want.Start
		require.Equal(t, want, got)
	})
}

// TestACutTraceSaysSo truncates a trace at every byte of its first and last parts, and at some places in between.
func TestACutTraceSaysSo(t *testing.T) {
	b := Encode(example())
	for n := 0; n < len(b); n++ {
		if n == 200 {
			n = len(b) - 200
		}
		got, err := Read(bytes.NewReader(b[:n]))
		if n < len(magic) {
			require.ErrorIs(t, err, ErrFormat, "%d bytes", n)
			continue
		}
		require.ErrorIs(t, err, ErrCut, "%d bytes", n)
		if n > len(b)-200 {
			require.Greater(t, len(got.Events), 10000, "the part before the cut is returned")
		}
	}
}

func TestADamagedTraceSaysSo(t *testing.T) {
	b := Encode(example())
	for n := 0; n < len(b); n += 1 + n/50 {
		bad := bytes.Clone(b)
		bad[n] ^= 0x10
		got, err := Read(bytes.NewReader(bad))
		require.Error(t, err, "byte %d", n)
		ours := errors.Is(err, ErrFormat) || errors.Is(err, ErrVersion) || errors.Is(err, ErrCorrupt) ||
			errors.Is(err, ErrCut)
		require.True(t, ours, "byte %d: %v", n, err)
		if n >= headerSize {
			require.NotNil(t, got)
		}
	}
	_, err := Read(bytes.NewReader(append(b, 1, 2, 3)))
	require.ErrorIs(t, err, ErrCorrupt)
	require.ErrorContains(t, err, "follows its end")
}

func TestAnotherVersionIsNamed(t *testing.T) {
	b := Encode(example())
	binary.LittleEndian.PutUint32(b[8:], 2)
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	_, err := Read(bytes.NewReader(b))
	require.ErrorIs(t, err, ErrVersion)
	require.ErrorContains(t, err, "it has version 2, but this gaiafs reads 1")
	_, err = Read(strings.NewReader("PNG is another format altogether, and long enough"))
	require.ErrorIs(t, err, ErrFormat)
}

func TestAReaderThatFailsIsReported(t *testing.T) {
	b := Encode(example())
	for _, n := range []int{0, 10, headerSize, headerSize + 4, headerSize + 100} {
		_, err := Read(io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(io.ErrClosedPipe)))
		require.ErrorIs(t, err, io.ErrClosedPipe)
	}
}

// block wraps records as a file of one block, with valid checksums.
func block(records []byte) []byte {
	e := NewEncoder(time.Unix(0, 0))
	e.block = records
	e.close()
	return e.Take()
}

func TestRecordsThatMakeNoSenseAreRefused(t *testing.T) {
	for name, records := range map[string][]byte{
		"kind":          {99},
		"no file":       {recordAccess, 0, 0, 0, 0, 0, 0, 1},
		"number":        {recordFile, 0xff},
		"name":          {recordFile, 1, 200, 'a'},
		"size":          append(binary.AppendUvarint([]byte{recordFile}, 1<<63), 0),
		"pattern":       {recordFile, 1, 0, recordSource, 0, 1, recordAccess, 0, 0, 3, 0, 0, 0, 1},
		"no bytes":      {recordFile, 1, 0, recordSource, 0, 1, recordAccess, 0, 0, 0, 0, 0, 0, 0},
		"before start":  {recordFile, 1, 0, recordSource, 0, 1, recordAccess, 0, 0, 0, 1, 0, 0, 1},
		"resize":        {recordResize, 3, 0, 0},
		"write":         {recordWrite, 0, 0, 0, 0, 0},
		"count":         {recordEnd, 7},
		"after the end": {recordEnd, 0, recordLost, 1},
	} {
		_, err := Read(bytes.NewReader(block(records)))
		require.ErrorIs(t, err, ErrCorrupt, name)
	}
}

func TestTheEncoderWritesOnlyWhatCanBeRead(t *testing.T) {
	e := NewEncoder(time.Unix(0, 0))
	f := e.File(File{Name: strings.Repeat("x", 2*maxName), Size: -1})
	s := e.Source(Source{Device: 3, Thread: 9})
	e.Event(Event{File: 7, Source: s, Len: 1})
	e.Event(Event{File: f, Source: 7, Len: 1})
	e.Event(Event{File: f, Source: s, Off: -1, Len: 1})
	e.Event(Event{File: f, Source: s})
	e.Event(Event{File: f, Source: s, Off: MaxEnd, Len: 1})
	e.Event(Event{File: f, Source: s, Off: 5, Len: 2*MaxLen + 1, Took: -1, Pattern: 77})
	require.Len(t, e.Take(), headerSize)
	e.Flush()
	e.End()
	got, err := Read(io.MultiReader(bytes.NewReader(NewEncoder(time.Unix(0, 0)).Take()), bytes.NewReader(e.Take())))
	require.NoError(t, err)
	require.Equal(t, []Event{
		{Off: 5, Len: MaxLen, Pattern: prefetch.Random}, {Off: 5 + MaxLen, Len: MaxLen, Pattern: prefetch.Random},
		{Off: 5 + 2*MaxLen, Len: 1, Pattern: prefetch.Random},
	}, got.Events)
	require.Len(t, got.Files[0].Name, maxName)
	require.Equal(t, "gpu3:9", got.Sources[0].String())
	require.Equal(t, "cpu:1", Source{CPU, 1}.String())
}

func FuzzRead(f *testing.F) {
	b := Encode(example())
	f.Add(b[:2000])
	f.Add(Encode(&Trace{Files: []File{{"a", 5}}, Sources: []Source{{CPU, 1}},
		Events: []Event{{Len: 5}, {Len: 9, Resize: true}}}))
	f.Add(block([]byte{recordFile, 1, 0, recordSource, 0, 1, recordAccess, 0, 0, 0, 0, 0, 0, 1, recordEnd, 1}))
	f.Fuzz(func(t *testing.T, b []byte) {
		// The fuzzer changes the records, not the checksums.
		for at := headerSize; at+8 <= len(b); {
			n := int(binary.LittleEndian.Uint32(b[at:]))
			if n <= 0 || n > len(b)-at-8 {
				break
			}
			binary.LittleEndian.PutUint32(b[at+4:], crc32.Checksum(b[at+8:at+8+n], castagnoli))
			at += 8 + n
		}
		got, err := Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := Read(bytes.NewReader(Encode(got)))
		require.NoError(t, err)
		require.Equal(t, got.Events, again.Events)
		require.Equal(t, got.Sources, again.Sources)
	})
}
