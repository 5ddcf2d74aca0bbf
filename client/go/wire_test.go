package gaiafs

import (
	"encoding/hex"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

var frameFiles = []string{"../../control/testdata/frames.txt", "../../control/testdata/frames2.txt"}

// loadFrames reads the frames that test every implementation of the protocol.
func loadFrames(t testing.TB) map[string][]byte {
	t.Helper()
	frames := make(map[string][]byte)
	for _, file := range frameFiles {
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

func countingToken() (token [16]byte) {
	for i := range token {
		token[i] = byte(i)
	}
	return token
}

func countingUUID() (uuid [16]byte) {
	for i := range uuid {
		uuid[i] = byte(0x10 + i)
	}
	return uuid
}

func countingKey() (key [16]byte) {
	for i := range key {
		key[i] = byte(0x20 + i)
	}
	return key
}

// numberedMapping is a mapping with a given number of the daemon's.
func numberedMapping(n mappingID) *Mapping {
	return &Mapping{assembly: assembly{reply: mapped{mapping: n}}}
}

func TestRequestsAreEncodedAsDocumented(t *testing.T) {
	frames := loadFrames(t)
	token, uuid, key := countingToken(), countingUUID(), countingKey()
	for name, got := range map[string][]byte{
		"hello": frame(typeHello, 0, helloBody(1, 1)),
		"map": frame(typeMap, 1, mapBody(token, 3, ProtRead|ProtWrite, mapLazy|mapLaunder, 0, 0x200000,
			0x123456789, uuid)),
		"map-read": frame(typeMap, 2, mapBody(token, 0, ProtRead, 0, 0, 0, 1, [16]byte{})),
		"hello2":   frame(typeHello, 0, helloBody(1, 2)),
		"map2": frame(typeMap, 1, mapBody(token, 3, ProtRead|ProtWrite, mapLazy, KindEmulated, 0x200000,
			0x123456789, [16]byte{})),
		"features":        frame(typeFeatures, 2, featuresBody(3, "")),
		"features-view":   frame(typeFeatures, 2, featuresBody(usedFeatures&^featureGroup&^featureMove, "")),
		"features-group":  frame(typeFeatures, 2, featuresBody(usedFeatures&^featureMove, "")),
		"features-move":   frame(typeFeatures, 2, featuresBody(usedFeatures&^featureGroup, "")),
		"features-tenant": frame(typeFeatures, 2, featuresBody(usedFeatures|featureTenant, "training")),
		"use": frame(typeUse, 11, useBody(9, useNested, 1500, []Range{
			{numberedMapping(7), 4096, 8192}, {numberedMapping(8), 0, 0x123456789a}})),
		"done": frame(typeDone, 12, doneBody(9)),
		"begin-group": frame(typeBeginGroup, 10,
			groupRanges([]Range{{numberedMapping(7), 4096, 8192}, {numberedMapping(8), 0, 0x123456789}})),
		"large":      largeFrame(typePing, 6, 0x12345),
		"file":       frame(typeFile, 10, fileBody(token, fileVerify, 2, 0x200000, 0x123456789)),
		"file-evict": frame(typeFile, 11, fileBody(token, fileEvict, allDevices, 0, 0)),
		"profile":    frame(typeProfile, 12, profileBody(token, ProfileCPU, 30000)),
		"watch":      frame(typeWatch, 13, append(token[:], `{"path":"a"}`...)),
		"set":        frame(typeSet, 12, setBody(token, []string{"eviction=lfu", "gpu-memory=1G"})),
		"mapview": frame(typeMapView, 7, viewBody(3, KindEmulated, [16]byte{}, mapLazy, 256, [][16]byte{token},
			[]Segment{{Offset: 0x5678, Length: 0x1234, Stride: 99}})),
		"mapview-files": frame(typeMapView, 8, viewBody(0, 0, uuid, mapLaunder, 4096, [][16]byte{token, key}, []Segment{
			{1, 0x123456789a, 0x1001, 0x2000, 3}, {Length: 1}, {Length: 1, Count: 1}})),
		"mapview-large":     largeFrame(typeMapView, 9, 0x1400030),
		"attach":            frame(typeAttach, 3, key[:]),
		"answer":            frame(typeAnswer, 4, answerBody(0, 6)),
		"answer-eperm":      frame(typeAnswer, 5, answerBody(uint32(syscall.EPERM), 5)),
		"acquire":           frame(typeAcquire, 3, rangeBody(7, 4096, 8192, acquireLaunder)),
		"release":           frame(typeRelease, 4, rangeBody(7, 0, 1, 0)),
		"sync":              frame(typeSync, 5, rangeBody(7, 0, 0x123456789, syncDurable)),
		"advise-normal":     frame(typeAdvise, 6, rangeBody(7, 0, 4096, uint32(AdviceNormal))),
		"advise-random":     frame(typeAdvise, 7, rangeBody(7, 0, 4096, uint32(AdviceRandom))),
		"advise-sequential": frame(typeAdvise, 8, rangeBody(7, 0, 4096, uint32(AdviceSequential))),
		"advise-willneed":   frame(typeAdvise, 9, rangeBody(7, 0, 4096, uint32(AdviceWillNeed))),
		"advise-dontneed":   frame(typeAdvise, 10, rangeBody(7, 0, 4096, uint32(AdviceDontNeed))),
		"unmap":             frame(typeUnmap, 11, unmapBody(7)),
		"status":            frame(typeStatus, 12, token[:]),
		"ping":              frame(typePing, 0xfedcba9876543210, nil),
		"record":            frame(typeRecord, 13, token[:]),
		"stop":              frame(typeStop, 14, stopBody(13)),
		"end":               frame(typeEnd, 15, endBody(token, endForce)),
	} {
		require.Equal(t, frames[name], got, name)
	}
}

func TestRepliesAreDecodedAsDocumented(t *testing.T) {
	frames := loadFrames(t)
	check := func(name string, want header, body any, wantBody any) {
		t.Helper()
		h, b, err := decodeHeader(frames[name])
		require.NoError(t, err, name)
		require.Equal(t, want, h, name)
		out := reflect.ValueOf(body).Call([]reflect.Value{reflect.ValueOf(b)})
		require.True(t, out[1].IsNil(), "%s: %v", name, out[1])
		require.Equal(t, wantBody, out[0].Interface(), name)
	}
	mappedIn := func(v uint16) any { return func(b []byte) (mapped, error) { return decodeMapped(v, b) } }
	extentsIn := func(v uint16) any { return func(b []byte) (extents, error) { return decodeExtents(v, b) } }
	check("welcome", header{typeWelcome, 0, 0}, decodeWelcome, welcome{version: 1, maxRequests: 128, maxRequest: 4096,
		maxExtents: 128, kinds: 3})
	welcome2 := welcome{2, 128, 4096, 128, 3, 3, 0, countingKey()}
	check("welcome2", header{typeWelcome, 0, 0}, decodeWelcome, welcome2)
	welcome2.offered, welcome2.required = 3|1<<63|1<<62, 1<<62
	check("welcome2-longer", header{typeWelcome, 0, 0}, decodeWelcome, welcome2)
	first := mapped{7, uint32(KindEmulated), 3, 0x123456000, 2, [16]byte{}, false}
	check("mapped", header{typeMapped, flagMore, 1}, mappedIn(1), first)
	check("mapped", header{typeMapped, flagMore, 1}, mappedIn(2), first)
	check("mapped2-longer", header{typeMapped, flagMore, 1}, mappedIn(2), first)
	check("mapped-unknown-size", header{typeMapped, flagMore, 2}, mappedIn(1),
		mapped{8, uint32(KindCUDA), 0, -1, 1, countingUUID(), false})
	check("mapped-movable", header{typeMapped, 0, 10}, mappedIn(2),
		mapped{7, uint32(KindEmulated), 3, 0x123456000, 0, [16]byte{}, true})
	check("extents", header{typeExtents, 0, 1}, extentsIn(1),
		extents{0, []extentPlace{{off: 0x200000, size: 0x200000}, {off: 0x400000, size: 0x200000}}})
	places2 := []extentPlace{{0x200000, 0x200000, KindEmulated, 1, 5}, {0x400000, 0x400000, KindCUDA, 2, 0x123456789a}}
	check("extents2", header{typeExtents, 0, 1}, extentsIn(2), extents{0, places2})
	check("extents2-longer", header{typeExtents, 0, 1}, extentsIn(2), extents{0, places2})
	check("move", header{typeMove, 0, 5}, decodeMove, move{7, extentPlace{0x400000, 0x200000, KindCUDA, 2, 6}, 5})
	check("result", header{typeResult, 0, 3}, decodeResult, result{0, 0x1234567890, ""})
	check("result-enomem", header{typeResult, 0, 4}, decodeResult,
		result{uint32(syscall.ENOMEM), 0, "no room: 1 GiB budget of device 3 is spent é"})
	check("error", header{typeError, 0, 0}, decodeResult, result{uint32(syscall.ETIMEDOUT), 0, "no HELLO in time"})
	check("document", header{typeDocument, flagMore, 12}, func(b []byte) (string, error) { return string(b), nil },
		`{"a":`)

	for name, status := range map[string]bool{"ioctl-grant": false, "ioctl-grant-status": true} {
		g, err := decodeGrant(frames[name])
		require.NoError(t, err)
		require.Equal(t, grant{status, countingToken(), "/run/gaiafs/x.sock"}, g)
	}
}

// FuzzReply feeds the decoders arbitrary replies. They must neither panic nor return more than the frame holds.
func FuzzReply(f *testing.F) {
	for _, b := range loadFrames(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, record []byte) {
		_, _ = decodeGrant(record)
		h, body, err := decodeHeader(record)
		if err != nil {
			return
		}
		switch h.typ {
		case typeWelcome:
			_, _ = decodeWelcome(body)
		case typeMapped:
			_, _ = decodeMapped(1, body)
			_, _ = decodeMapped(2, body)
		case typeExtents:
			if e, err := decodeExtents(1, body); err == nil && len(body) != 8+16*len(e.places) {
				t.Fatalf("%d extents of %d bytes", len(e.places), len(body))
			}
			if e, err := decodeExtents(2, body); err == nil && len(body) < 16+32*len(e.places) {
				t.Fatalf("%d extents of %d bytes", len(e.places), len(body))
			}
		case typeMove:
			_, _ = decodeMove(body)
		case typeResult, typeError:
			if r, err := decodeResult(body); err == nil && len(r.text) != len(body)-16 {
				t.Fatalf("text of %d bytes in %d", len(r.text), len(body))
			}
		}
	})
}

func TestReleaseAtLeast(t *testing.T) {
	for release, want := range map[string]bool{
		"6.16.0": true, "6.18.3-x": true, "7.0": true, "6.15.9": false, "5.20.1": false, "6": false, "6.16rc1": true,
		"":         false,
		"10.2-foo": true,
	} {
		require.Equal(t, want, releaseAtLeast(release, 6, 16), release)
	}
}
