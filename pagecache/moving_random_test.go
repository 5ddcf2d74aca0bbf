package pagecache

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

var manyMoves = flag.Int("moves", 1000, "the number of moves that TestRandomMoves makes; 100000 take a few minutes")

// TestRandomMoves: clients of two devices with room for few extents use, store, release, acquire and unmap at random.
// CPU programs and a mapping that does not move run along. The placement changes now and then. Byte i of a file belongs
// to writer i mod 3: two devices, and the CPU. go test ./pagecache -run TestRandomMoves -moves 100000 makes more moves.
func TestRandomMoves(t *testing.T) {
	testdevice.Emulated(t, "clients map memory in this process")
	left := *manyMoves
	for seed := uint64(0); left > 0; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := newMovingWorld(t, seed)
			before := left
			for step := 0; step < 2000 && left > 0; step++ {
				w.step()
				left = before - w.moves()
			}
			w.finish()
		})
		if t.Failed() {
			return
		}
	}
}

const (
	worldDevices = 2
	worldBricks  = 5 // of a file
	worldBytes   = worldBricks*brick - 2*page.Size - 5
	worldCPU     = worldDevices
)

// movingWorld is a machine with an oracle: what its programs may see, and how that came about.
type movingWorld struct {
	t       *testing.T
	seed    uint64
	rnd     *rand.Rand
	m       *machine
	files   []*movingFile
	clients []*movingClient
	// loose allows wrong bytes; wrong says that a watched byte was wrong.
	loose, wrong bool
}

// movingFile is a file and the values that each of its bytes had: the oracle.
type movingFile struct {
	*source
	first  []byte         // the bytes before any store
	values map[int][]byte // of each byte that was stored into, oldest first
	// published is the index in values of the last released or written one. seen is the least index that a device may
	// show.
	published map[int]int
	seen      [worldDevices]map[int]int
	// trace, if not nil, records the history of the bytes in watched; programs prefer these.
	trace   *model.Trace
	watched []int
}

// movingClient is a client with its open brackets.
type movingClient struct {
	*traveller
	of     *movingFile
	device int
	open   []movingBracket
}

type movingBracket struct {
	*Bracket
	from, to int // in bytes
}

func newMovingWorld(t *testing.T, seed uint64, watched ...int) *movingWorld {
	w := &movingWorld{t: t, seed: seed, rnd: rand.New(rand.NewPCG(seed, 13))}
	w.m = newMovingMachine(t, worldDevices, 3+int(seed%3), int(seed%4))
	w.place()
	for range 2 {
		src := w.m.noisyFile(worldBytes)
		for _, at := range watched {
			src.home.data[at] = 0
		}
		f := &movingFile{source: src, first: bytes.Clone(src.home.data), values: map[int][]byte{},
			published: map[int]int{}}
		if watched != nil {
			f.watch(watched)
		}
		for d := range f.seen {
			f.seen[d] = map[int]int{}
		}
		f.reader = &openHome{Home: f.home}
		// One mapping keeps the File alive, so that CPU writes go through it. Its memory does not move.
		w.m.run(f.source, int(w.m.next)%worldDevices, 0, page.Size, false)
		w.files = append(w.files, f)
	}
	for i := range 4 {
		w.clients = append(w.clients, &movingClient{})
		w.start(w.clients[i])
	}
	return w
}

// place chooses a placement at random. Low numbers let extents reach the threshold.
func (w *movingWorld) place() {
	require.NoError(w.t, w.m.cache.SetPlacement(PlacementPolicy{Name: PlacementNames()[w.rnd.IntN(2)],
		Threshold: 1 + w.rnd.Uint64N(4), Penalty: 1 + w.rnd.Uint64N(3)}))
}

func (w *movingWorld) moves() int {
	c := &w.m.cache.counters
	return int(c.MovedIn.Load() + c.MovedOut.Load() + c.Evictions.Load())
}

// start begins a client.
func (w *movingWorld) start(c *movingClient) {
	*c = movingClient{of: w.files[w.rnd.IntN(len(w.files))], device: w.rnd.IntN(worldDevices)}
	c.traveller = w.m.travelAs(c.of.source, c.device, MapRequest{Writable: true, Len: worldBytes})
}

func (w *movingWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d: %s", w.seed, fmt.Sprintf(format, args...))
}

// store notes a store by a writer.
func (f *movingFile) store(at int, b byte) {
	f.trace.Store(f.agent(at%3), int64(at), b)
	if f.values[at] == nil {
		f.values[at] = []byte{f.first[at]}
	}
	f.values[at] = append(f.values[at], b)
}

// check checks the bytes from byte first on, as a viewer sees them.
func (w *movingWorld) check(f *movingFile, viewer, first int, got []byte) {
	w.t.Helper()
	f.trace.Read(f.agent(viewer), int64(first), got)
	untouched := bytes.Clone(got)
	for at, all := range f.values {
		if at < first || at >= first+len(got) {
			continue
		}
		b, least := got[at-first], len(all)-1
		switch {
		case at%3 == viewer:
		case viewer == worldCPU:
			least = f.published[at]
		default:
			least = f.seen[viewer][at]
		}
		if bytes.IndexByte(all[least:], b) < 0 {
			if w.loose {
				w.wrong = w.wrong || slices.Contains(f.watched, at)
				continue
			}
			w.fail("%d sees %d at byte %d of page %d, want one of %v of %v", viewer, b, at, at>>page.Shift, all[least:],
				all)
		}
		untouched[at-first] = f.first[at]
	}
	inside := min(len(got), worldBytes-first)
	beyond := bytes.ContainsFunc(untouched[inside:], func(r rune) bool { return r != 0 })
	if !w.loose && (beyond || !bytes.Equal(f.first[first:first+inside], untouched[:inside])) {
		w.fail("%d sees what nobody stored in the %d bytes at %d", viewer, len(got), first)
	}
}

// publish notes that a device released [from, to).
func (f *movingFile) publish(device, from, to int) {
	f.trace.Release(f.agent(device), int64(from), int64(to-from))
	for at, all := range f.values {
		if at%3 == device && from <= at && at < to {
			f.published[at] = len(all) - 1
		}
	}
}

// current notes that a device acquired [from, to).
func (f *movingFile) current(device, from, to int) {
	f.trace.Acquire(f.agent(device), int64(from), int64(to-from))
	for at := range f.values {
		if from <= at && at < to {
			f.seen[device][at] = max(f.seen[device][at], f.published[at])
		}
	}
}

func (w *movingWorld) step() {
	if w.rnd.IntN(200) == 0 {
		w.place()
	}
	c := w.clients[w.rnd.IntN(len(w.clients))]
	f := c.of
	from := w.rnd.IntN(worldBytes)
	to := from + 1 + w.rnd.IntN(worldBytes-from)
	switch op := w.rnd.IntN(20); {
	case op < 8:
		w.bracket(c)
	case op < 11:
		if n := len(c.open); n > 0 {
			i := w.rnd.IntN(n)
			c.open[i].Done()
			c.open = append(c.open[:i], c.open[i+1:]...)
		}
	case op < 14:
		for _, b := range c.open {
			w.work(c, b)
		}
	case op == 14:
		_, err := c.Release(context.Background(), int64(from), int64(to-from))
		require.NoError(w.t, err)
		f.publish(c.device, from&^(page.Size-1), (to+page.Size-1)&^(page.Size-1))
	case op == 15:
		_, err := c.Acquire(context.Background(), int64(from), int64(to-from), false)
		require.NoError(w.t, err)
		f.current(c.device, from, to)
	case op == 16:
		at := w.byteOf(f, worldCPU, 0, worldBytes)
		b := byte(w.rnd.Uint32())
		f.store(at, b)
		f.source.write(w.t, at, []byte{b})
		f.published[at] = len(f.values[at]) - 1
	case op == 17:
		to = min(to, from+4*page.Size)
		w.check(f, worldCPU, from, f.source.read(w.t, from, to-from))
	case op == 18:
		require.NoError(w.t, f.attached.Sync(context.Background(), nil))
	default:
		w.stop(c)
		w.start(c)
	}
}

// stop ends a client in the middle of its work.
func (w *movingWorld) stop(c *movingClient) {
	if w.rnd.IntN(2) == 0 { // it is killed inside its brackets
		c.end()
	}
	for _, b := range c.open {
		b.Done()
	}
	c.end()
	c.of.publish(c.device, 0, worldBytes)
}

// bracket begins a bracket and works in it.
func (w *movingWorld) bracket(c *movingClient) {
	from := w.rnd.IntN(worldBricks)
	to := min(from+1+w.rnd.IntN(2), worldBricks)
	u, err := c.try(from, to)
	if err != nil {
		require.ErrorIs(w.t, err, syscall.EDEADLK)
		for _, o := range w.clients { // some client has to let go
			for _, b := range o.open {
				b.Done()
			}
			o.open = nil
		}
		return
	}
	b := movingBracket{u, from * brick, min(to*brick, len(c.host))}
	w.work(c, b)
	c.open = append(c.open, b)
}

// byteOf returns a byte of a writer in [from, to), or near it.
func (w *movingWorld) byteOf(f *movingFile, writer, from, to int) int {
	for _, at := range f.watched {
		if at%3 == writer && from <= at && at < to && w.rnd.IntN(2) == 0 {
			return at
		}
	}
	return (from+w.rnd.IntN(to-from))/3*3 + writer
}

// work checks the bytes of a bracket and stores some.
func (w *movingWorld) work(c *movingClient, b movingBracket) {
	w.check(c.of, c.device, b.from, c.host[b.from:b.to])
	for range w.rnd.IntN(4) {
		at := w.byteOf(c.of, c.device, b.from, b.to)
		if at >= b.from && at < min(b.to, worldBytes) {
			v := byte(w.rnd.Uint32())
			c.of.store(at, v)
			c.host[at] = v
		}
	}
}

func (w *movingWorld) finish() {
	for _, c := range w.clients {
		w.stop(c)
	}
	for _, f := range w.files {
		require.NoError(w.t, f.attached.Sync(context.Background(), nil))
		home := f.home.bytes(0, worldBytes)
		f.trace.Read(f.agent(worldCPU), 0, home)
		if w.loose {
			continue
		}
		for at, all := range f.values {
			if home[at] != all[len(all)-1] {
				w.fail("home has %d at byte %d, where %v were stored", home[at], at, all)
			}
		}
	}
}
