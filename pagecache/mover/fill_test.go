package mover

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// bytesHome is a Home in memory. Reads beyond a given byte fail.
type bytesHome struct {
	data  []byte
	wrong int64 // 0: nothing fails
}

var errHome = errors.New("home cannot be read")

func (h *bytesHome) ReadAt(p []byte, off int64) (int, error) {
	if h.wrong > 0 && off+int64(len(p)) > h.wrong {
		return 0, errHome
	}
	return copy(p, h.data[min(off, int64(len(h.data))):]), nil
}

// flat is a Target that has the file's bytes at their offsets in one Memory.
type flat struct {
	mem     gpubackend.Memory
	mu      sync.Mutex
	arrived []page.Range // protected by mu
}

func (f *flat) Placer() Placer { return f }

func (f *flat) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	return append(list, gpubackend.Copy{Mem: f.mem, Off: pages.Offset(), Host: buf})
}

func (f *flat) AppendPatches([]gpubackend.Patch, *Step, []byte, []gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("nothing is patched")
}

func (*flat) Sent([]*Piece) {}

func (f *flat) Arrived(pieces []*Piece) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range pieces {
		for _, s := range x.Steps {
			f.arrived = append(f.arrived, s.Pages)
		}
	}
}

// filler fills memory of an emulated device from a home of random bytes.
type filler struct {
	home  *bytesHome
	dev   *faulty.Device
	moves *Device
	into  *flat
}

func newFiller(t testing.TB, size int64) *filler {
	inner, err := emulated.New(emulated.Options{Memory: size})
	require.NoError(t, err)
	f := &filler{home: &bytesHome{data: make([]byte, size)}, dev: faulty.Wrap(inner)}
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(f.home.data)
	mem, err := f.dev.Alloc(size)
	require.NoError(t, err)
	f.into = &flat{mem: mem}
	f.moves = NewDevice(f.dev, new(schedule.FCFS), nil, func(error) {})
	t.Cleanup(func() {
		require.NoError(t, mem.Free())
		require.NoError(t, f.dev.Close())
	})
	return f
}

func (f *filler) fill() *Fill {
	all := page.Range{End: page.Count(int64(len(f.home.data)))}
	return &Fill{
		Device: f.moves, Class: Acquire, From: &Source{Home: f.home}, Into: f.into,
		Pieces: Pieces(1, func(int) Update { return Update{Pages: all} }, []Run{{Pages: all}}, nil),
	}
}

// TestFill brings pieces with several workers, and expects each to be reported once.
func TestFill(t *testing.T) {
	f := newFiller(t, 64<<20)
	x := f.fill()
	require.NoError(t, x.Run(t.Context(), nil))
	for i := range x.Pieces {
		require.True(t, x.Pieces[i].Done)
	}
	f.requireFilled(t)
	slices.SortFunc(f.into.arrived, func(a, b page.Range) int { return int(a.Start - b.Start) })
	at := page.Index(0)
	for _, rg := range f.into.arrived {
		require.Equal(t, at, rg.Start)
		at = rg.End
	}
	require.EqualValues(t, 64<<20, at.Offset())
}

// TestFillFails: after an error, earlier pieces are there, and nothing is in progress.
func TestFillFails(t *testing.T) {
	f := newFiller(t, 64<<20)
	f.home.wrong = 32 << 20
	x := f.fill()
	require.ErrorIs(t, x.Run(t.Context(), nil), errHome)
	require.False(t, x.Pieces[len(x.Pieces)-1].Done)
	require.Empty(t, x.ready)
	require.Zero(t, x.busy)

	f.home.wrong = 0
	f.dev.Fail(faulty.CopyIn, 2, gpubackend.ErrDeviceLost)
	require.ErrorIs(t, f.fill().Run(t.Context(), nil), gpubackend.ErrDeviceLost)

	ctx, cancel := context.WithCancel(t.Context())
	gate := f.dev.Hold(faulty.CopyIn)
	ended := make(chan error)
	go func() { ended <- f.fill().Run(ctx, nil) }()
	<-gate.Arrived()
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled, "the wait for the device ends with the context")
	gate.Open()
}

// TestJoin: copies that are adjacent in device memory become one, whatever lies between their bytes on the host. Every
// byte still goes to its place, also those of rows and of copies from other memory.
func TestJoin(t *testing.T) {
	f := newFiller(t, 2<<20)
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		buf := make([]byte, 10000)
		for i := range buf {
			buf[i] = byte(rnd.Uint32())
		}
		var copies []gpubackend.Copy
		off := int64(0)
		for range 1 + rnd.IntN(60) { // some in order, some not, and some with overlapping bytes
			from := rnd.IntN(len(buf))
			if n := len(copies); n > 0 && rnd.IntN(4) > 0 {
				from = min(cap(buf)-cap(copies[n-1].Host)+len(copies[n-1].Host)+rnd.IntN(100), len(buf)-1)
			}
			c := gpubackend.Copy{Mem: f.into.mem, Off: off, Host: buf[from:][:1+rnd.IntN(min(200, len(buf)-from))]}
			switch rnd.IntN(8) {
			case 0:
				c.Row, c.Stride = int64(len(c.Host)), int64(len(c.Host)+rnd.IntN(50))
				n := len(c.Host) + rnd.IntN(4)*int(c.Stride)
				c.Host = buf[from:][:min(n, len(c.Host)+(len(buf)-from-len(c.Host))/int(c.Stride)*int(c.Stride))]
			case 1:
				c.Host = append(make([]byte, 0, len(c.Host)+rnd.IntN(len(buf))), c.Host...)
			}
			copies, off = append(copies, c), off+c.Bytes()+int64(rnd.IntN(3)*rnd.IntN(2))
		}
		bytesOf := func(list []gpubackend.Copy) []byte {
			all := make([]byte, off)
			for i := range list {
				for at, row := range list[i].Rows() {
					copy(all[at:], row)
				}
			}
			return all
		}
		want, before := bytesOf(copies), len(copies)
		gathered := gather(copies, make([]byte, copySizes(copies)))
		require.True(t, bytes.Equal(want, bytesOf(gathered)), "seed %d: %d copies were gathered", seed, before)
		joined := join(copies, buf)
		require.True(t, bytes.Equal(want, bytesOf(joined)), "seed %d: %d copies became %d", seed, before, len(joined))
	}
	buf := make([]byte, 1000)
	var rows []gpubackend.Copy
	for i := range 10 {
		rows = append(rows, gpubackend.Copy{Mem: f.into.mem, Off: int64(i) * 10, Host: buf[i*100:][:10]})
	}
	require.Len(t, join(rows, buf), 1)
}

// BenchmarkHeuristics alternates fills from home with and without each heuristic. It reports the time with it as a
// fraction of the time without: below 1, the heuristic helps.
func BenchmarkHeuristics(b *testing.B) {
	for _, size := range []int64{1 << 20, 8 << 20, 64 << 20} {
		f := newFiller(b, size)
		look := func() { // stands for the planning of what to read
			for begin := time.Now(); time.Since(begin) < 50*time.Microsecond; {
			}
		}
		fill := func(early bool) time.Duration {
			begin := time.Now()
			var crew *Crew
			if early {
				crew = CallCrew()
			}
			look()
			require.NoError(b, f.fill().Run(context.Background(), crew))
			took := time.Since(begin)
			f.into.arrived = f.into.arrived[:0]
			return took
		}
		compare := func(name string, with, without func() time.Duration) {
			b.Run(name+"/"+strconv.Itoa(int(size>>20))+" MiB", func(b *testing.B) {
				var a, c []time.Duration
				for b.Loop() {
					a, c = append(a, with()), append(c, without())
				}
				slices.Sort(a)
				slices.Sort(c)
				b.ReportMetric(float64(a[len(a)/2])/float64(c[len(c)/2]), "with/without")
			})
		}
		compare("crew", func() time.Duration { return fill(true) }, func() time.Duration { return fill(false) })
		spin := waitSpin
		compare("spin", func() time.Duration { return fill(false) }, func() time.Duration {
			waitSpin = 0
			defer func() { waitSpin = spin }()
			return fill(false)
		})
	}
}

// gatedHome is a Home whose reads wait for permission.
type gatedHome struct {
	bytesHome
	waiting chan struct{} // gets an element for each read
	through chan struct{} // each element lets one read go on; closing it lets all go on
}

func (h *gatedHome) ReadAt(p []byte, off int64) (int, error) {
	h.waiting <- struct{}{}
	<-h.through
	return h.bytesHome.ReadAt(p, off)
}

// TestFillsShareReaders: several Fills of a device read with fewer goroutines each, and the last one uses all again.
func TestFillsShareReaders(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	const size, fills = 256 << 20, 4
	f := newFiller(t, size)
	var homes [fills]*gatedHome
	var ended [fills]chan error
	expect := func(i, n int) {
		for range n {
			<-homes[i].waiting
		}
		select {
		case <-homes[i].waiting:
			t.Fatalf("more than %d readers of fill %d", n, i)
		default:
		}
	}
	all := Readers()
	const last = 5 // of 12: 2 of each fill send, and the 4 fills share the other 10
	for i, share := range [fills]int{all, 7, 6, last} {
		homes[i] = &gatedHome{bytesHome: bytesHome{data: f.home.data},
			waiting: make(chan struct{}), through: make(chan struct{})}
		ended[i] = make(chan error, 1)
		x := f.fill()
		x.From = &Source{Home: homes[i]}
		go func() { ended[i] <- x.Run(t.Context(), nil) }()
		expect(i, share)
	}
	for range all { // let each reader of the first Fill through once
		homes[0].through <- struct{}{}
	}
	expect(0, last)
	for i := 1; i < fills; i++ {
		close(homes[i].through)
		go func() {
			for range homes[i].waiting {
			}
		}()
		require.NoError(t, <-ended[i])
	}
	homes[0].through <- struct{}{}
	expect(0, all-last+1)
	close(homes[0].through)
	go func() {
		for range homes[0].waiting {
		}
	}()
	require.NoError(t, <-ended[0])
	for _, h := range homes {
		close(h.waiting)
	}
}
