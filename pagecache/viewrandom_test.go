package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestRandomViews: programs write, release, truncate, map and unmap while views of random segments are acquired. Each
// acquire must bring everything released or written before it.
func TestRandomViews(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomViews(t, seed) })
	}
}

func randomViews(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 5))
	m := newMachine(t, 2, memory(32<<20), pinnedMemory(64<<20))
	m.cache.leastPeer = 1
	const size = 40 * page.Size
	sources := []*source{m.noisyFile(size), m.noisyFile(size / 2)}
	if seed%2 == 0 {
		for _, s := range sources {
			s.disk = newDisk(s.home)
		}
	}
	var views []*viewer
	var programs []*program
	for range 300 {
		src := sources[rnd.IntN(2)]
		switch op := rnd.IntN(12 + int(seed)%3); {
		case op < 2 && len(views) < 6 || len(views) == 0:
			var segments []view.Segment
			for range 1 + rnd.IntN(6) {
				s := view.Segment{File: rnd.IntN(2), Offset: rnd.Int64N(size), Length: 1 + rnd.Int64N(9000), Count: 1}
				if rnd.IntN(2) == 0 {
					s.Stride, s.Count = s.Length+rnd.Int64N(9000), 1+rnd.Int64N(5)
				}
				segments = append(segments, s)
			}
			v := m.view(ViewRequest{Device: rnd.IntN(2), Segments: segments}, sources...)
			v.check()
			views = append(views, v)
		case op == 2:
			i := rnd.IntN(len(views))
			views[i].unmap()
			views = append(views[:i], views[i+1:]...)
		case op == 3:
			programs = append(programs, m.run(src, rnd.IntN(2), 0, size, true))
		case op < 6 && len(programs) > 0:
			i := rnd.IntN(len(programs))
			p := programs[i]
			p.store(rnd.IntN(int(p.f.Size())+1), byte(rnd.Uint32()))
			p.release()
			if rnd.IntN(3) == 0 {
				p.unmap()
				programs = append(programs[:i], programs[i+1:]...)
			}
		case op == 6 && src.attached != nil && !src.attached.Detached():
			src.truncate(t, size/4+rnd.Int64N(size/2))
		case op == 7:
			if src.disk != nil {
				_, err := src.disk.ReadAt(make([]byte, 1), 0) // the changed bytes are in the host's page cache
				require.NoError(t, err)
			}
			src.home.editAt(rnd.IntN(100), []byte{byte(rnd.Uint32())})
		case op < 10 && src.attached != nil:
			b := make([]byte, 1+rnd.IntN(6000))
			for i := range b {
				b[i] = byte(rnd.Uint32())
			}
			src.write(t, rnd.IntN(size/4), b)
		case op == 12:
			m.lock(src)
		case op == 13:
			m.pin(src, Pinning{Host: rnd.IntN(2) == 0})
		default:
			v := views[rnd.IntN(len(views))]
			v.acquire()
			v.check()
		}
	}
	for _, p := range programs {
		p.unmap()
	}
	for _, v := range views {
		v.acquire()
		v.check()
		v.unmap()
	}
}

// TestViewsAndWritersAtOnce: an acquire brings the bytes written before it began, while others write and acquire.
func TestViewsAndWritersAtOnce(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(64 * page.Size)
	req := ViewRequest{Segments: []view.Segment{{Offset: 1, Length: 100, Stride: 4096, Count: 64}}}
	var readers [3]*viewer
	for k := range readers {
		req.Alignment = 64 << k // a view each: during an update a view has old and new bytes
		readers[k] = m.view(req, src)
	}
	var last [4]atomic.Int64
	var group sync.WaitGroup
	for w := range last {
		group.Go(func() {
			for n := int64(1); n < 200; n++ {
				at := (w*16 + int(n)%16) * page.Size
				src.write(t, at+1, bytes.Repeat([]byte{byte(n)}, 100))
				last[w].Store(n)
			}
		})
	}
	for _, v := range readers {
		group.Go(func() {
			for range 100 {
				var before [4]int64
				for w := range last {
					before[w] = last[w].Load()
				}
				_, err := v.Acquire(context.Background(), 0, v.Size(), false)
				if err != nil {
					t.Error(err)
					return
				}
				all := v.all()
				for w, n := range before {
					if n == 0 {
						continue
					}
					at := (w*16 + int(n)%16) * 100
					if all[at] != byte(n) && all[at] != byte(n+16) && all[at] < byte(n) {
						t.Errorf("writer %d wrote %d, but the view has %d", w, n, all[at])
						return
					}
				}
			}
		})
	}
	group.Wait()
}
