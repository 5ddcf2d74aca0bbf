package pagecache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestMovesBesideEachOther: clients of two devices use, store, release, acquire and unmap at the same time, and some
// stop for a while. CPU programs and views run concurrently. Each byte has one writer, which adds 1 to it, so every
// reader knows how old its bytes are.
func TestMovesBesideEachOther(t *testing.T) {
	for seed := range uint64(max(1, *manyMoves/1000)) {
		w := newBusyWorld(t, seed)
		w.run(250)
		w.finish()
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// busyWriters is the number of writers: the clients, and the CPU as the last.
const busyWriters = 5

// busyWorld is a machine with a file whose programs run at the same time.
type busyWorld struct {
	t     *testing.T
	seed  uint64
	m     *machine
	src   *source
	first []byte
	// stored counts the stores into a byte, published those of them that everybody must see.
	stored, published [worldBytes]atomic.Uint32
	// least is the newest value of a byte that a device has shown so far, or must show from now on.
	least [worldDevices][worldBytes]atomic.Uint32
	work  sync.WaitGroup
	stop  chan struct{}
}

func newBusyWorld(t *testing.T, seed uint64) *busyWorld {
	w := &busyWorld{t: t, seed: seed, stop: make(chan struct{})}
	w.m = newMovingMachine(t, worldDevices, 3+int(seed%3), int(seed%4))
	w.src = w.m.noisyFile(worldBytes)
	w.src.reader = &openHome{Home: w.src.home}
	w.first = w.src.home.bytes(0, worldBytes)
	return w
}

// run makes every program take so many steps.
func (w *busyWorld) run(steps int) {
	v := w.m.view(ViewRequest{Device: int(w.seed) % worldDevices, Segments: []view.Segment{bytesOf(5, brick-10)}},
		w.src)
	for i := range busyWriters - 1 {
		w.work.Go(func() { w.client(i, steps) })
	}
	w.work.Go(func() { w.cpu(steps) })
	var others sync.WaitGroup
	others.Go(func() {
		for !w.stopped() {
			w.m.cache.collectDue(context.Background())
			runtime.Gosched()
		}
	})
	others.Go(func() {
		for !w.stopped() {
			least := w.snapshot(5, brick-5)
			_, err := v.Acquire(context.Background(), 0, v.Size(), false)
			assert.NoError(w.t, err)
			w.check(5, v.all(), least, "a view")
		}
	})
	w.work.Wait()
	close(w.stop)
	others.Wait()
}

func (w *busyWorld) stopped() bool {
	select {
	case <-w.stop:
		return true
	default:
		return w.t.Failed()
	}
}

// snapshot returns the values of [from, to) that an acquire must show from now on.
func (w *busyWorld) snapshot(from, to int) []uint32 {
	least := make([]uint32, to-from)
	for i := range least {
		least[i] = w.published[from+i].Load()
	}
	return least
}

// check checks that the bytes from byte first on are no older than least and no newer than the stores.
func (w *busyWorld) check(first int, got []byte, least []uint32, who string) {
	for i, b := range got {
		at := first + i
		if at >= worldBytes {
			if b != 0 {
				w.t.Errorf("%s sees %d past the end, at byte %d", who, b, at)
				return
			}
			continue
		}
		most := w.stored[at].Load()
		if age := uint32(b - w.first[at]); age < least[i] || age > most {
			w.t.Errorf("%s of %d sees byte %d of page %d, of writer %d, after %d stores; want %d to %d", who, w.seed,
				at%page.Size, at/page.Size,
				at%busyWriters, age, least[i], most)
			return
		}
	}
}

// look checks the bytes of a device, and that it never shows older bytes later.
func (w *busyWorld) look(device, first int, got []byte, who string) {
	got = got[:min(len(got), worldBytes-first)]
	least := make([]uint32, len(got))
	for i := range least {
		least[i] = w.least[device][first+i].Load()
	}
	w.check(first, got, least, who)
}

func (w *busyWorld) raise(of *atomic.Uint32, to uint32) {
	for was := of.Load(); was < to && !of.CompareAndSwap(was, to); was = of.Load() {
	}
}

func (w *busyWorld) client(writer, steps int) {
	rnd := rand.New(rand.NewPCG(w.seed, uint64(writer)))
	device := writer % worldDevices
	c := w.m.travelAs(w.src, device, MapRequest{Writable: true, Len: worldBytes})
	mine := make([]uint32, worldBytes) // stored and not published
	publish := func(from, to int) {
		for at := from; at < to; at++ {
			if at%busyWriters == writer {
				w.raise(&w.published[at], mine[at])
			}
		}
	}
	for range steps {
		if w.t.Failed() {
			return
		}
		from := rnd.IntN(worldBytes)
		to := from + 1 + rnd.IntN(worldBytes-from)
		switch op := rnd.IntN(16); {
		case op < 10:
			first := rnd.IntN(worldBricks)
			last := min(first+1+rnd.IntN(2), worldBricks)
			patience := time.Duration(1+rnd.IntN(8)) * time.Millisecond
			u, err := w.m.cache.Use(context.Background(), []Use{c.over(first, last)}, UseOptions{Patience: patience})
			if err != nil {
				if !errors.Is(err, syscall.ETIMEDOUT) {
					w.t.Errorf("bracket: %v", err)
				}
				continue
			}
			for range 1 + rnd.IntN(3) {
				w.look(device, first*brick, c.host[first*brick:min(last*brick, len(c.host))],
					fmt.Sprintf("a bracket of device %d", device))
				for range rnd.IntN(4) {
					at := (first*brick+rnd.IntN((last-first)*brick))/busyWriters*busyWriters + writer
					if at >= first*brick && at < min(last*brick, worldBytes) && mine[at] < 200 {
						w.stored[at].Add(1)
						mine[at]++
						c.host[at]++
						w.raise(&w.least[device][at], mine[at])
					}
				}
			}
			u.Done()
		case op < 12:
			_, err := c.Release(context.Background(), int64(from), int64(to-from))
			if !assert.NoError(w.t, err) {
				return
			}
			publish(from&^(page.Size-1), min((to+page.Size-1)&^(page.Size-1), worldBytes))
		case op < 14:
			least := w.snapshot(from, to)
			_, err := c.Acquire(context.Background(), int64(from), int64(to-from), false)
			if !assert.NoError(w.t, err) {
				return
			}
			for i, n := range least {
				w.raise(&w.least[device][from+i], n)
			}
		case op == 14 && rnd.IntN(4) == 0:
			c.stopped.Lock()
			time.AfterFunc(time.Duration(rnd.IntN(3))*time.Millisecond, c.stopped.Unlock)
		case op == 15 && rnd.IntN(4) == 0:
			c.end()
			publish(0, worldBytes)
			c = w.m.travelAs(w.src, device, MapRequest{Writable: true, Len: worldBytes})
		}
	}
	c.end()
	publish(0, worldBytes)
}

func (w *busyWorld) cpu(steps int) {
	rnd := rand.New(rand.NewPCG(w.seed, 99))
	for range steps {
		from := rnd.IntN(worldBytes)
		to := min(worldBytes, from+1+rnd.IntN(4*page.Size))
		switch rnd.IntN(8) {
		case 0:
			assert.NoError(w.t, w.src.attached.Sync(context.Background(), nil))
		case 1, 2, 3:
			at := rnd.IntN(worldBytes/busyWriters)*busyWriters + busyWriters - 1
			if n := w.stored[at].Load(); n < 200 {
				w.stored[at].Add(1)
				w.src.write(w.t, at, []byte{w.first[at] + byte(n+1)})
				w.published[at].Store(n + 1)
			}
		default:
			least := w.snapshot(from, to)
			w.check(from, w.src.read(w.t, from, to-from), least, "the CPU")
		}
		if w.t.Failed() {
			return
		}
	}
}

func (w *busyWorld) finish() {
	require.NoError(w.t, w.src.attached.Sync(context.Background(), nil))
	home := w.src.home.bytes(0, worldBytes)
	for at := range home {
		if want := w.first[at] + byte(w.stored[at].Load()); home[at] != want {
			w.t.Errorf("home has %d at byte %d, of writer %d, want %d", home[at], at, at%busyWriters, want)
			return
		}
	}
}
