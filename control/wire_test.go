package control

import (
	"encoding/hex"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// loadFrames reads the frames that every implementation of the protocol is tested against.
func loadFrames(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile("testdata/frames.txt")
	require.NoError(t, err)
	frames := make(map[string][]byte)
	for line := range strings.Lines(string(text)) {
		name, digits, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || name == "#" {
			continue
		}
		frames[name], err = hex.DecodeString(digits)
		require.NoError(t, err, name)
	}
	return frames
}

// countingUUID is the UUID of the frames.
func countingUUID() (uuid [uuidSize]byte) {
	for i := range uuid {
		uuid[i] = byte(0x10 + i)
	}
	return uuid
}

func TestRepliesAreEncodedAsDocumented(t *testing.T) {
	frames := loadFrames(t)
	places := []extentPlace{{0x200000, 0x200000}, {0x400000, 0x200000}}
	for name, got := range map[string][]byte{
		"welcome": appendFrame(nil, typeWelcome, 0, 0, welcome{1, 128, 3}.append),
		"mapped": appendFrame(nil, typeMapped, flagMore, 1,
			mapped{7, 1, 3, 0x123456000, 2, [16]byte{}}.append),
		"mapped-unknown-size": appendFrame(nil, typeMapped, flagMore, 2, mapped{8, 2, 0, -1, 1, countingUUID()}.append),
		"extents":             appendFrame(nil, typeExtents, 0, 1, extents{0, places}.append),
		"result":              appendFrame(nil, typeResult, 0, 3, result{pages: 0x1234567890}.append),
		"result-enomem": appendFrame(nil, typeResult, 0, 4,
			result{errno: uint32(syscall.ENOMEM), text: "no room: 1 GiB budget of device 3 is spent é"}.append),
		"document": appendFrame(nil, typeDocument, flagMore, 12,
			func(b []byte) []byte { return append(b, `{"a":`...) }),
		"error": errorFrame(0, syscall.ETIMEDOUT, "no HELLO in time"),
	} {
		require.Equal(t, frames[name], got, name)
	}
}

func TestRequestsAreDecodedAsDocumented(t *testing.T) {
	frames := loadFrames(t)
	open := func(name string, typ frameType, id requestID) []byte {
		t.Helper()
		h, body, err := decodeHeader(frames[name])
		require.NoError(t, err, name)
		require.Equal(t, header{uint32(len(frames[name])), typ, 0, id}, h, name)
		return body
	}
	var token [tokenSize]byte
	for i := range token {
		token[i] = byte(i)
	}
	hi, err := decodeHello(open("hello", typeHello, 0))
	require.NoError(t, err)
	require.Equal(t, hello{1, 1}, hi)
	m, err := decodeMap(open("map", typeMap, 1))
	require.NoError(t, err)
	require.Equal(t, mapRequest{token, 3, protRead | protWrite, mapLazy | mapLaunder, 0x200000, 0x123456789,
		countingUUID()}, m)
	m, err = decodeMap(open("map-read", typeMap, 2))
	require.NoError(t, err)
	require.Equal(t, mapRequest{token, 0, protRead, 0, 0, 1, [16]byte{}}, m)
	for i, c := range []struct {
		name string
		typ  frameType
		want rangeRequest
	}{
		{"acquire", typeAcquire, rangeRequest{7, 4096, 8192, acquireLaunder}},
		{"release", typeRelease, rangeRequest{7, 0, 1, 0}},
		{"sync", typeSync, rangeRequest{7, 0, 0x123456789, syncDurable}},
		{"advise-normal", typeAdvise, rangeRequest{7, 0, 4096, adviceNormal}},
		{"advise-random", typeAdvise, rangeRequest{7, 0, 4096, adviceRandom}},
		{"advise-sequential", typeAdvise, rangeRequest{7, 0, 4096, adviceSequential}},
		{"advise-willneed", typeAdvise, rangeRequest{7, 0, 4096, adviceWillNeed}},
		{"advise-dontneed", typeAdvise, rangeRequest{7, 0, 4096, adviceDontNeed}},
	} {
		r, err := decodeRange(open(c.name, c.typ, requestID(3+i)))
		require.NoError(t, err)
		require.Equal(t, c.want, r, c.name)
	}
	u, err := decodeUnmap(open("unmap", typeUnmap, 11))
	require.NoError(t, err)
	require.Equal(t, mappingID(7), u)
	s, err := decodeStatus(open("status", typeStatus, 12))
	require.NoError(t, err)
	require.Equal(t, token, s)
	require.Empty(t, open("ping", typePing, 0xfedcba9876543210))
	s, err = decodeStatus(open("record", typeRecord, 13))
	require.NoError(t, err)
	require.Equal(t, token, s)
	stop, err := decodeStop(open("stop", typeStop, 14))
	require.NoError(t, err)
	require.Equal(t, requestID(13), stop)
	end, err := decodeEnd(open("end", typeEnd, 15))
	require.NoError(t, err)
	require.Equal(t, endRequest{token, endForce}, end)
}

func TestMalformedBodies(t *testing.T) {
	for n := range 80 {
		b := make([]byte, n)
		_, err := decodeHello(b)
		require.Error(t, err, "no magic")
		_, err = decodeMap(b)
		require.Equal(t, n == 64, err == nil)
		_, err = decodeRange(b)
		require.Equal(t, n == 32, err == nil)
		_, err = decodeUnmap(b)
		require.Equal(t, n == 8, err == nil)
		_, err = decodeStop(b)
		require.Equal(t, n == 8, err == nil)
		_, err = decodeStatus(b)
		require.Equal(t, n == 16, err == nil)
		_, _, err = decodeHeader(b)
		require.Error(t, err, "length 0")
	}
	_, err := decodeHello([]byte("GAIA\x02\x00\x01\x00"))
	require.ErrorContains(t, err, "version range 2 to 1 is empty")
}

func TestTextFitsAFrame(t *testing.T) {
	for _, s := range []string{"", "plain", "zero\x00byte", "\xff\xfe", strings.Repeat("é", maxText),
		strings.Repeat("a", maxText) + "b"} {
		got := cutText(s)
		require.LessOrEqual(t, len(got), maxText)
		require.True(t, utf8.ValidString(got))
		require.NotContains(t, got, "\x00")
		require.LessOrEqual(t, len(result{text: s}.append(nil)), maxFrame-headerSize)
	}
	require.Equal(t, strings.Repeat("é", maxText/2), cutText(strings.Repeat("é", maxText)))
}

func TestRangeWithin(t *testing.T) {
	const big = 1<<63 - 1
	require.True(t, rangeWithin(0, 10, 10))
	require.True(t, rangeWithin(10, 0, 10))
	require.False(t, rangeWithin(1, 10, 10))
	require.False(t, rangeWithin(-1, 1, 10))
	require.False(t, rangeWithin(0, -1, 10))
	require.False(t, rangeWithin(big, big, 10))
	require.False(t, rangeWithin(5, big, big))
}

// A range of a mapping may go to the end of its last page, and never past its length into the cache.
func TestClip(t *testing.T) {
	m := &openMap{length: 5000}
	for _, c := range []struct {
		off, n       int64
		wantOff, got int64
		ok           bool
	}{
		{0, 5000, 0, 5000, true}, {0, 8192, 0, 5000, true}, {4096, 4096, 4096, 904, true}, {8191, 1, 4999, 1, true},
		{5000, 3192, 4999, 1, true}, {0, 8193, 0, 0, false}, {8192, 1, 0, 0, false}, {0, 0, 0, 0, false},
		{-1, 1, 0, 0, false}, {1, 1<<63 - 1, 0, 0, false},
	} {
		off, n, ok := m.clip(c.off, c.n)
		require.Equal(t, c.ok, ok, "%+v", c)
		require.Equal(t, [2]int64{c.wantOff, c.got}, [2]int64{off, n}, "%+v", c)
	}
}

// FuzzRequest feeds the decoders what a client might send. They must not panic, and what they accept must be the frame
// that was sent.
func FuzzRequest(f *testing.F) {
	for _, b := range loadFrames(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, record []byte) {
		h, body, err := decodeHeader(record)
		if err != nil {
			return
		}
		if int(h.length) != len(record) || len(body) != len(record)-headerSize {
			t.Fatalf("header %+v of %d bytes", h, len(record))
		}
		again := appendFrame(nil, h.typ, h.flags, h.id, func(b []byte) []byte { return append(b, body...) })
		require.Equal(t, record, again)
		_, _ = decodeHello(body)
		_, _ = decodeMap(body)
		_, _ = decodeRange(body)
		_, _ = decodeUnmap(body)
		_, _ = decodeStatus(body)
	})
}
