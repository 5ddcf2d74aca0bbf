package control_test

import (
	"context"
	"encoding/binary"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// viewRequest is a MAPVIEW of files with an alignment, and deliberate faults.
type viewRequest struct {
	device, kind, flags uint32
	alignment           uint64
	tokens              [][16]byte
	count, size         uint32 // of the segments; 0 means the actual number, of 40 bytes each
	segments            [][5]uint64
}

func (r viewRequest) body() []byte {
	if r.count == 0 {
		r.count = uint32(len(r.segments))
	}
	if r.size == 0 {
		r.size = 40
	}
	b := frame(mapView, 0, r.device, r.kind, [16]byte{}, r.flags, uint32(len(r.tokens)), r.alignment, r.count,
		r.size)[16:]
	for _, token := range r.tokens {
		b = append(b, token[:]...)
	}
	for _, s := range r.segments {
		for _, n := range s[:4] {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(s[4]))
		b = append(b, make([]byte, r.size-36)...)
	}
	return b
}

func (r viewRequest) frame(id uint64) []byte { return frame(mapView, id, r.body()) }

// connectViews is connectAll for a client that chooses views.
func (s *server) connectViews() *client {
	s.t.Helper()
	c, _ := s.connect2()
	require.Zero(s.t, c.call(frame(choose, 1, uint64(8|2), uint64(0))).errno())
	return c
}

func TestMapView(t *testing.T) {
	s := start(t, &controltest.Cache{Devices: 1})
	c := s.connectViews()
	r := viewRequest{alignment: 256, tokens: [][16]byte{s.token(), s.token()}, size: 48, segments: [][5]uint64{
		{5, 100, 0, 1, 0}, {7, 3, 10, 4, 1},
	}}
	c.send(r.frame(2))
	m := c.read()
	require.Equal(t, uint16(mapped), m.typ)
	require.EqualValues(t, 256+12, binary.LittleEndian.Uint64(m.body[16:]), "the size of the view")
	e := c.read()
	require.Equal(t, uint16(extents), e.typ)
	require.Equal(t, 1, e.fds)
	require.Zero(t, binary.LittleEndian.Uint64(e.body[16:]), "the offset in the view")
	last := c.read()
	require.Equal(t, uint16(extents), last.typ, "the bytes are there")
	require.Zero(t, last.fds)
	require.EqualValues(t, 1, binary.LittleEndian.Uint32(last.body), "the extents before it")
	require.Zero(t, binary.LittleEndian.Uint32(last.body[4:]))
	for _, typ := range []uint16{acquire, release, syncTo} {
		require.Zero(t, c.call(rangeFrame(typ, 3, m.mapping(), 200, 68, 0)).errno())
		require.Equal(t, syscall.EINVAL, c.call(rangeFrame(typ, 3, m.mapping(), 200, 4096, 0)).errno(), "outside")
	}
	require.Zero(t, c.call(frame(unmap, 4, m.mapping())).errno())
	s.waitMapped(0)

	// A large body.
	r = viewRequest{alignment: 1, tokens: [][16]byte{s.token()}}
	for i := range uint64(1000) {
		r.segments = append(r.segments, [5]uint64{i, 1, 0, 1, 0})
	}
	body := r.body()
	f := memfd(t, 0, 0)
	_, err := f.WriteAt(body, 0)
	require.NoError(t, err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sealed)
	require.NoError(t, err)
	c.sendLarge(mapView, 5, uint64(len(body)), f)
	m = c.read()
	require.Equal(t, uint16(mapped), m.typ)
	require.EqualValues(t, 1000, binary.LittleEndian.Uint64(m.body[16:]))
	c.read()
	c.read()
	c.close()
	s.waitMapped(0)
}

// The memory of a view comes before its bytes. If these do not come, the client gives the mapping back.
func TestMapViewComesBeforeItsBytes(t *testing.T) {
	bytes := make(chan error)
	s := start(t, &controltest.Cache{Devices: 1, Gate: func(context.Context) error { return <-bytes }})
	c := s.connectViews()
	ask := func(flags uint32) {
		one := [][5]uint64{{0, 1, 0, 1, 0}}
		c.send(viewRequest{alignment: 1, flags: flags, tokens: [][16]byte{s.token()}, segments: one}.frame(2))
	}
	for _, want := range []syscall.Errno{0, syscall.EIO} {
		ask(0)
		m, e := c.read(), c.read()
		require.Equal(t, uint16(mapped), m.typ)
		require.Equal(t, 1, e.fds)
		if want == 0 {
			bytes <- nil
			require.Equal(t, uint16(extents), c.read().typ)
		} else {
			bytes <- want
			require.Equal(t, want, c.read().errno())
		}
		require.Zero(t, c.call(frame(unmap, 4, m.mapping())).errno())
		s.waitMapped(0)
	}
	ask(1) // lazy
	m, e := c.read(), c.read()
	require.Equal(t, uint16(extents), e.typ)
	require.Zero(t, c.call(frame(unmap, 4, m.mapping())).errno(), "a lazy view has no more frames")
}

func TestMapViewIsRefused(t *testing.T) {
	s := start(t, &controltest.Cache{Devices: 1})
	c := s.connectViews()
	one := [][5]uint64{{0, 1, 0, 1, 0}}
	for name, k := range map[string]struct {
		r    viewRequest
		want syscall.Errno
	}{
		"segments":    {viewRequest{alignment: 1, count: 1<<19 + 1, segments: one}, syscall.EINVAL},
		"flags":       {viewRequest{alignment: 1, flags: 4, segments: one}, syscall.EINVAL},
		"kind":        {viewRequest{alignment: 1, kind: 256, segments: one}, syscall.ENODEV},
		"device":      {viewRequest{alignment: 1, device: 1 << 17, segments: one}, syscall.ENODEV},
		"no device":   {viewRequest{alignment: 1, device: 1, segments: one}, syscall.ENODEV},
		"no segments": {viewRequest{alignment: 1}, syscall.EINVAL},
		"offset":      {viewRequest{alignment: 1, segments: [][5]uint64{{1 << 63, 1, 0, 1, 0}}}, syscall.EINVAL},
		"file":        {viewRequest{alignment: 1, segments: [][5]uint64{{0, 1, 0, 1, 1}}}, syscall.EINVAL},
		"alignment":   {viewRequest{alignment: 1 << 63, segments: one}, syscall.EINVAL},
	} {
		t.Run(name, func(t *testing.T) {
			k.r.tokens = [][16]byte{s.token()}
			r := c.call(k.r.frame(2))
			require.Equal(t, k.want, r.errno(), r.text())
			require.NotEmpty(t, r.text())
		})
	}
	// All tokens are used up, whatever is wrong.
	tokens := [][16]byte{s.token(), {1}, s.token()}
	require.Equal(t, syscall.EACCES, c.call(viewRequest{alignment: 1, tokens: tokens, segments: one}.frame(2)).errno())
	for _, token := range tokens {
		require.Equal(t, syscall.EACCES, c.call(mapFrame(3, token, 1, 0, 1)).errno())
	}
	// A body that is shorter than it says ends the connection.
	b := viewRequest{alignment: 1, tokens: tokens[:1], count: 2, segments: one}.frame(2)
	c.send(b)
	last := c.ended()
	require.Equal(t, uint16(failure), last.typ)
	require.Contains(t, last.text(), "body has")

	// A client that did not choose views is refused with a reason.
	plain, _ := s.connectAll()
	require.Equal(t, syscall.EOPNOTSUPP,
		plain.call(viewRequest{alignment: 1, tokens: tokens[:1], segments: one}.frame(2)).errno())
}

// TestRequestsForMemoryAreShownWithFiles: watchers see which files a client maps, as they are or in a view, and where.
func TestRequestsForMemoryAreShownWithFiles(t *testing.T) {
	var feed live.Feed
	s := start(t, &controltest.Cache{Devices: 2}, func(o *control.Options) { o.Live = &feed })
	w := feed.Watch(live.Filter{Kinds: []string{"map", "map-view"}, Path: s.file.Name()})
	defer w.Stop()
	c := s.connectViews()
	shown := func(want live.Event) {
		t.Helper()
		events := w.Next(t.Context())
		require.Len(t, events, 1)
		e := events[0]
		require.Equal(t, want, live.Event{Kind: e.Kind, File: e.File, ID: e.ID, Device: e.Device, Bytes: e.Bytes})
	}
	id := live.FileID(s.file.ID())
	c.send(mapFrameOn(2, s.token(), 1, [16]byte{}, 1, 0, 4096))
	require.Equal(t, uint16(mapped), c.read().typ)
	shown(live.Event{Kind: "map", File: s.file.Name(), ID: id, Device: "gpu1", Bytes: 4096})
	for c.read().typ != extents {
	}
	r := viewRequest{alignment: 256, tokens: [][16]byte{s.token(), s.token()}, size: 48,
		segments: [][5]uint64{{5, 100, 0, 1, 0}, {7, 3, 10, 4, 1}}}
	c.send(r.frame(3))
	require.Equal(t, uint16(mapped), c.read().typ)
	shown(live.Event{Kind: "map-view", File: s.file.Name(), ID: id, Device: "gpu0"})
}
