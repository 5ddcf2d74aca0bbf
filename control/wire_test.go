package control

import (
	"encoding/binary"
	"encoding/hex"
	"github.com/gaiafs/gaiafs/pagecache/live"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/view"
)

// loadFrames reads the frames that test every implementation of the protocol.
func loadFrames(t testing.TB) map[string][]byte {
	t.Helper()
	frames := make(map[string][]byte)
	for _, file := range []string{"testdata/frames.txt", "testdata/frames2.txt"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			name, digits, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok || name == "#" {
				continue
			}
			frames[name], err = hex.DecodeString(digits)
			require.NoError(t, err, name)
		}
	}
	return frames
}

// countingUUID is the UUID in the frames.
func countingUUID() (uuid [uuidSize]byte) {
	for i := range uuid {
		uuid[i] = byte(0x10 + i)
	}
	return uuid
}

// countingKey is the key in the frames.
func countingKey() (key sessionKey) {
	for i := range key {
		key[i] = byte(0x20 + i)
	}
	return key
}

func TestRepliesAreEncodedAsDocumented(t *testing.T) {
	frames := loadFrames(t)
	places := extents{places: []extentPlace{{off: 0x200000, size: 0x200000}, {off: 0x400000, size: 0x200000}}}
	places2 := extents{places: []extentPlace{{0x200000, 0x200000, 1, tierDevice, 5},
		{0x400000, 0x400000, 2, tierHost, 0x123456789a}}}
	in := func(v version, e extents) func([]byte) []byte { return func(b []byte) []byte { return e.append(b, v) } }
	welcome2 := welcome{version: 2, maxRequests: 128, kinds: 3, offered: featureService | featureLarge,
		key: countingKey()}
	for name, got := range map[string][]byte{
		"welcome": appendFrame(nil, typeWelcome, 0, 0,
			welcome{version: 1, maxRequests: 128, kinds: 3}.append),
		"welcome2": appendFrame(nil, typeWelcome, 0, 0, welcome2.append),
		"mapped": appendFrame(nil, typeMapped, flagMore, 1,
			mapped{7, 1, 3, 0x123456000, 2, [16]byte{}, false}.append),
		"mapped-unknown-size": appendFrame(nil, typeMapped, flagMore, 2,
			mapped{8, 2, 0, -1, 1, countingUUID(), false}.append),
		"extents":  appendFrame(nil, typeExtents, 0, 1, in(1, places)),
		"extents2": appendFrame(nil, typeExtents, 0, 1, in(2, places2)),
		"check":    appendFrame(nil, typeCheck, 0, 4, nil),
		"recall":   appendFrame(nil, typeRecall, 0, 8, nil),
		"move": appendFrame(nil, typeMove, 0, 5, move{7, extentPlace{0x400000, 0x200000, 2, tierHost, 6},
			5}.append),
		"move-none": appendFrame(nil, typeMove, 0, 6, move{7, extentPlace{0x400000, 0x200000, 1, tierNone, 0},
			6}.append),
		"mapped-movable": appendFrame(nil, typeMapped, 0, 10,
			mapped{7, 1, 3, 0x123456000, 0, [16]byte{}, true}.append),
		"welcome-move": appendFrame(nil, typeWelcome, 0, 0,
			welcome{version: 2, maxRequests: 128, kinds: 3,
				offered: featureService | featureLarge | featureMove | featureView, key: countingKey()}.append),
		"invalidated": appendFrame(nil, typeInvalidated, 0, 0, invalidated{7, 4096, 8192}.append),
		"budget":      appendFrame(nil, typeBudget, 0, 0, budget{3, 2, countingUUID(), 0x123456000, 0x1000}.append),
		"result":      appendFrame(nil, typeResult, 0, 3, result{pages: 0x1234567890}.append),
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
	hi, err = decodeHello(open("hello2", typeHello, 0))
	require.NoError(t, err)
	require.Equal(t, hello{1, 2}, hi)
	for _, v := range []version{1, 2} { // both versions accept what a version-1 client sends
		m, err := v.decodeMap(open("map", typeMap, 1))
		require.NoError(t, err)
		require.Equal(t, mapRequest{token, 3, protRead | protWrite, mapLazy | mapLaunder, 0, 0x200000, 0x123456789,
			countingUUID()}, m)
		m, err = v.decodeMap(open("map-read", typeMap, 2))
		require.NoError(t, err)
		require.Equal(t, mapRequest{token, 0, protRead, 0, 0, 0, 1, [16]byte{}}, m)
	}
	const v = maxVersion
	m, err := v.decodeMap(open("map2", typeMap, 1))
	require.NoError(t, err)
	require.Equal(t, mapRequest{token, 3, protRead | protWrite, mapLazy, 1, 0x200000, 0x123456789, [16]byte{}}, m)
	m, err = minVersion.decodeMap(open("map2", typeMap, 1))
	require.NoError(t, err)
	require.Zero(t, m.kind, "reserved in version 1")
	f, name, err := v.decodeFeatures(open("features", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge, f)
	require.Empty(t, name)
	key, err := v.decodeAttach(open("attach", typeAttach, 3))
	require.NoError(t, err)
	require.Equal(t, countingKey(), key)
	a, err := v.decodeAnswer(open("answer", typeAnswer, 4))
	require.NoError(t, err)
	require.Equal(t, answer{0, 6, []byte{}}, a)
	a, err = v.decodeAnswer(open("answer-eperm", typeAnswer, 5))
	require.NoError(t, err)
	require.Equal(t, answer{uint32(syscall.EPERM), 5, []byte{}}, a)
	a, err = v.decodeAnswer(open("answer-recall", typeAnswer, 8))
	require.NoError(t, err)
	ended, more := a.ended()
	require.Equal(t, []endedBracket{{9, 0}, {0x123456789a, 0}}, ended)
	require.False(t, more)
	a, err = v.decodeAnswer(open("answer-recall-uses", typeAnswer, 8))
	require.NoError(t, err)
	ended, more = a.ended()
	require.Equal(t, []endedBracket{{9, 5}, {0x123456789a, 0xffffffff}}, ended)
	require.False(t, more)
	f, _, err = v.decodeFeatures(open("features-view", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge|featureView, f)
	f, _, err = v.decodeFeatures(open("features-group", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge|featureView|featureGroup, f)
	list, err := decodeGroupRanges(open("begin-group", typeBeginGroup, 10))
	require.NoError(t, err)
	require.Equal(t, []groupRange{{7, 4096, 8192}, {8, 0, 0x123456789}}, list)
	g, err := v.decodeGroup(open("release-group", typeReleaseGroup, 11))
	require.NoError(t, err)
	require.EqualValues(t, 3, g)
	g, err = v.decodeGroup(open("abort-group", typeAbortGroup, 12))
	require.NoError(t, err)
	require.EqualValues(t, 3, g)
	all, err := decodeAcquireAll(open("acquire-all", typeAcquireAll, 13))
	require.NoError(t, err)
	require.Equal(t, acquireAllRequest{0x1122334455, 500 * time.Millisecond, acquireLaunder, []groupRange{{7, 0, 1}}},
		all)
	require.Equal(t, frames["numbered"], appendFrame(nil, typeNumbered, 0, 11, numbered{0x1122334455, 0x1234}.append))
	f, name, err = v.decodeFeatures(open("features-move", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge|featureMove|featureView, f)
	require.Empty(t, name)
	f, name, err = v.decodeFeatures(open("features-tenant", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge|featureMove|featureView|featureGroup|featureTenant, f)
	require.Equal(t, "training", name)
	m, err = v.decodeMap(open("map-movable", typeMap, 10))
	require.NoError(t, err)
	require.Equal(t, mapRequest{token, 3, protRead | protWrite, mapMovable, 1, 0x200000, 0x123456789, [16]byte{}}, m)
	use, err := v.decodeUse(open("use", typeUse, 11))
	require.NoError(t, err)
	require.Equal(t, useRequest{9, useNested, 1500, 2, []rangeRequest{{7, 4096, 8192, 0}, {8, 0, 0x123456789a, 0}}},
		use)
	use, err = v.decodeUse(open("use-keep", typeUse, 13))
	require.NoError(t, err)
	require.Equal(t, useRequest{9, useKeep, 1500, 1, []rangeRequest{{mapping: 7, off: 4096, len: 8192}}}, use)
	done, err := v.decodeDone(open("done", typeDone, 12))
	require.NoError(t, err)
	require.Equal(t, endedBracket{9, 0}, done)
	done, err = v.decodeDone(open("done-uses", typeDone, 14))
	require.NoError(t, err)
	require.Equal(t, endedBracket{9, 0x12345}, done)
	f, _, err = v.decodeFeatures(open("features-uses", typeFeatures, 2))
	require.NoError(t, err)
	require.Equal(t, featureService|featureLarge|featureMove|featureKeep|featureUses, f)
	w, err := v.decodeMapView(open("mapview", typeMapView, 7))
	require.NoError(t, err)
	require.Equal(t, mapViewRequest{3, 1, [uuidSize]byte{}, mapLazy, 256, [][tokenSize]byte{token}, 1,
		[]view.Segment{{Offset: 0x5678, Length: 0x1234, Count: 1}}}, w)
	w, err = v.decodeMapView(open("mapview-files", typeMapView, 8))
	require.NoError(t, err)
	require.Equal(t, mapViewRequest{0, 0, countingUUID(), mapLaunder, 4096,
		[][tokenSize]byte{token, [tokenSize]byte(countingKey())}, 3,
		[]view.Segment{{File: 1, Offset: 0x123456789a, Length: 0x1001, Stride: 0x2000, Count: 3},
			{Length: 1, Count: 1}, {Length: 1, Count: 1}}}, w)
	file, err := v.decodeFile(open("file", typeFile, 10))
	require.NoError(t, err)
	require.Equal(t, fileRequest{token, FileVerify, 2, 0x200000, 0x123456789}, file)
	file, err = v.decodeFile(open("file-evict", typeFile, 11))
	require.NoError(t, err)
	require.Equal(t, fileRequest{token, FileEvict, allDevices, 0, 0}, file)
	profile, err := v.decodeProfile(open("profile", typeProfile, 12))
	require.NoError(t, err)
	require.Equal(t, profileRequest{token, ProfileCPU, 30000}, profile)
	watch, err := v.decodeWatch(open("watch", typeWatch, 13))
	require.NoError(t, err)
	require.Equal(t, watchRequest{token: token, filter: live.Filter{Path: "a"}}, watch)
	set, err := v.decodeSet(open("set", typeSet, 12))
	require.NoError(t, err)
	require.Equal(t, setRequest{token, []string{"eviction=lfu", "gpu-memory=1G"}}, set)
	h, body, err := decodeHeader(frames["large"])
	require.NoError(t, err)
	require.Equal(t, header{24, typePing, flagLarge, 6}, h)
	n, err := v.decodeLarge(body)
	require.NoError(t, err)
	require.EqualValues(t, 0x12345, n)
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
		r, err := v.decodeRange(open(c.name, c.typ, requestID(3+i)))
		require.NoError(t, err)
		require.Equal(t, c.want, r, c.name)
	}
	u, err := v.decodeUnmap(open("unmap", typeUnmap, 11))
	require.NoError(t, err)
	require.Equal(t, mappingID(7), u)
	s, err := v.decodeStatus(open("status", typeStatus, 12))
	require.NoError(t, err)
	require.Equal(t, token, s)
	require.Empty(t, open("ping", typePing, 0xfedcba9876543210))
	s, err = v.decodeStatus(open("record", typeRecord, 13))
	require.NoError(t, err)
	require.Equal(t, token, s)
	stop, err := v.decodeStop(open("stop", typeStop, 14))
	require.NoError(t, err)
	require.Equal(t, requestID(13), stop)
	end, err := v.decodeEnd(open("end", typeEnd, 15))
	require.NoError(t, err)
	require.Equal(t, endRequest{token, endForce}, end)
}

// Version 1 takes bodies of one size; later versions also take longer bodies.
func TestMalformedBodies(t *testing.T) {
	for v := minVersion; v <= maxVersion; v++ {
		for n := range 80 {
			b := make([]byte, n)
			fits := func(size int, err error) {
				t.Helper()
				require.Equal(t, n == size || v >= 2 && n > size, err == nil, "version %d, %d bytes", v, n)
			}
			_, err := decodeHello(b)
			require.Error(t, err, "no magic")
			_, err = v.decodeMap(b)
			fits(64, err)
			_, err = v.decodeRange(b)
			fits(32, err)
			_, err = v.decodeUnmap(b)
			fits(8, err)
			_, err = v.decodeStop(b)
			fits(8, err)
			_, err = v.decodeStatus(b)
			fits(16, err)
			_, err = v.decodeEnd(b)
			fits(24, err)
			_, _, err = v.decodeFeatures(b)
			fits(16, err)
			_, err = v.decodeAttach(b)
			fits(16, err)
			_, err = v.decodeAnswer(b)
			fits(16, err)
			_, err = v.decodeDone(b)
			fits(8, err)
			_, err = v.decodeLarge(b)
			fits(8, err)
			_, _, err = decodeHeader(b)
			require.Error(t, err, "length 0")
		}
	}
	_, err := decodeHello([]byte("GAIA\x02\x00\x01\x00"))
	require.ErrorContains(t, err, "version range 2 to 1 is empty")
}

// TestAnswersThatClaimMore: of brackets and uses that an answer to a RECALL does not have, it has none. The largest
// answer fits into a frame.
func TestAnswersThatClaimMore(t *testing.T) {
	le := binary.LittleEndian
	rest := func(ids, uses int) (b []byte) {
		for i := range ids {
			b = le.AppendUint64(b, uint64(100+i))
		}
		for i := range uses {
			b = le.AppendUint32(b, uint32(1+i))
		}
		return b
	}
	for _, c := range []struct {
		says       uint64
		ids, uses  int
		list, used int // brackets that the daemon ends, and those with uses
		more       bool
	}{
		{2, 2, 2, 2, 2, false}, {2, 2, 0, 2, 0, false}, {2, 2, 1, 2, 0, false}, {2, 2, 3, 2, 2, false},
		{1 << 63, 0, 0, 0, 0, false}, {1 << 63, 2, 0, 2, 0, false}, {0, 2, 2, 0, 0, false},
		{256, 256, 256, 256, 256, true}, {256, 256, 255, 256, 0, true}, {257, 256, 0, 256, 0, true},
		{256, 255, 1, 255, 0, false},
	} {
		a := answer{generation: c.says, rest: rest(c.ids, c.uses)}
		list, more := a.ended()
		require.Len(t, list, c.list, "%+v", c)
		require.Equal(t, c.more, more, "%+v", c)
		used := 0
		for i, b := range list {
			require.EqualValues(t, 100+i, b.id, "%+v", c)
			if b.uses != 0 {
				require.EqualValues(t, 1+i, b.uses, "%+v", c)
				used++
			}
		}
		require.Equal(t, c.used, used, "%+v", c)
	}
	require.LessOrEqual(t, headerSize+16+len(rest(256, 256)), maxRequest)
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

// A range of a mapping may extend to the end of its last page. The cache never sees more than its length.
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

// FuzzRequest feeds the decoders arbitrary frames. They must not panic, and what they accept must be the frame that was
// sent.
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
		for v := minVersion; v <= maxVersion; v++ {
			_, _ = v.decodeMap(body)
			_, _ = v.decodeMapView(body)
			_, _ = decodeGroupRanges(body)
			_, _ = decodeAcquireAll(body)
			_, _ = v.decodeGroup(body)
			_, _ = v.decodeRange(body)
			_, _ = v.decodeUnmap(body)
			_, _ = v.decodeStatus(body)
			_, _ = v.decodeEnd(body)
			_, _ = v.decodeStop(body)
			_, _, _ = v.decodeFeatures(body)
			_, _ = v.decodeAttach(body)
			_, _ = v.decodeUse(body)
			_, _ = v.decodeDone(body)
			if a, err := v.decodeAnswer(body); err == nil {
				list, _ := a.ended()
				require.LessOrEqual(t, 16+8*len(list), len(body))
			}
			_, _ = v.decodeLarge(body)
		}
	})
}
