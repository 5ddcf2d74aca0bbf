package pagecache

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

var atOnceFlag = flag.Int("at-once", 3, "how many programs TestViewsBesideEverything and TestViewsInRounds run")

// TestViewsBesideEverything: an acquire of a view shows every byte that was stored, and released, before it began, and
// all of a group or nothing of it. Everything else goes on meanwhile: two devices release, one of them groups of two
// files; CPU programs read in order, read at random, write and truncate; the times, the size and the bytes of the files
// change in SOURCE; other views come and go.
func TestViewsBesideEverything(t *testing.T) {
	for seed := range uint64(*atOnceFlag) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { newCrowd(t, seed).run() })
	}
}

const (
	crowdPages = 512 // of each file, and some more that come and go at its end
	crowdTail  = 20
	crowdTurns = 30 // at most 255, so that values only grow
)

// Bytes of a page, one for each kind of program. A later store has a greater value.
const (
	byDevice = iota * 5
	byGroup
	byCPU
	inSource
	crowdBytes
)

// crowdWrites reports whether a kind of program stores into a page. Changes made directly in SOURCE have their pages to
// themselves: while a device's bytes go home, others' may be overwritten.
func crowdWrites(kind int, p page.Index) bool {
	switch kind {
	case byDevice:
		return p%8 < 3 || p%8 == 5
	case byGroup:
		return p%8 == 2 || p%8 == 3 || p%64 == 6
	case byCPU:
		return p%8 == 1 || p%8 == 4 || p%8 == 5
	}
	return p%8 == 7
}

// crowd is two files, and programs that all do something with them at the same time.
type crowd struct {
	*testing.T
	m       *machine
	seed    uint64
	sources [2]*source
	values  [2]*crowdValues
	ended   context.Context
	writers sync.WaitGroup
	others  sync.WaitGroup
}

// crowdValues says for each byte which values it may have: what every acquire shows that begins now, and the last value
// that a program began to store.
type crowdValues struct {
	least, last [crowdBytes][crowdPages]atomic.Int32
}

func newCrowd(t *testing.T, seed uint64) *crowd {
	c := &crowd{T: t, m: newMachine(t, 3, memory(256<<20), pinnedMemory(64<<20)), seed: seed}
	if seed%2 == 0 {
		c.m.cache.leastPeer = 1
	}
	c.m.cache.gather = func(int64) time.Duration { return time.Second } // for what happens during a fill
	for i := range c.sources {
		s := c.m.file((crowdPages + crowdTail) * page.Size)
		if seed%3 == 0 {
			s.disk = newDisk(s.home)
		}
		c.sources[i], c.values[i] = s, new(crowdValues)
	}
	return c
}

// each calls do with random pages that a kind of program stores into.
func (c *crowd) each(rnd *rand.Rand, kind int, do func(p page.Index)) {
	from := page.Index(rnd.IntN(crowdPages))
	for p := from; p < min(from+page.Index(1+rnd.IntN(crowdPages)), crowdPages); p++ {
		if crowdWrites(kind, p) {
			do(p)
		}
	}
}

// turns runs a program that stores in turns, until the last one.
func (c *crowd) turns(number uint64, turn func(rnd *rand.Rand, value byte)) {
	c.writers.Go(func() {
		rnd := rand.New(rand.NewPCG(c.seed, number))
		for i := 0; i < crowdTurns && !c.Failed(); i++ {
			turn(rnd, byte(i+1))
		}
	})
}

// until runs a program until those that store have ended.
func (c *crowd) until(number uint64, turn func(rnd *rand.Rand)) {
	c.others.Go(func() {
		rnd := rand.New(rand.NewPCG(c.seed, number))
		for c.ended.Err() == nil && !c.Failed() {
			turn(rnd)
		}
	})
}

// stores stores a value, and returns what to call when every later acquire must show it.
func (c *crowd) stores(kind, file int, p page.Index, value byte, store func(at int)) (shown func()) {
	v := c.values[file]
	v.last[kind][p].Store(int32(value))
	store(int(p.Offset()) + kind)
	return func() { v.least[kind][p].Store(int32(value)) }
}

func (c *crowd) run() {
	var end context.CancelFunc
	c.ended, end = context.WithCancel(context.Background())
	defer end()
	const size = crowdPages * page.Size
	var device [2]*program
	var group []GroupRange
	var grouped [2]*program
	for i, src := range c.sources {
		device[i] = c.m.run(src, 0, 0, size, true)
		grouped[i] = c.m.run(src, 1, 0, size, true)
		group = append(group, GroupRange{grouped[i].Mapping, 0, size})
	}
	check := func(err error) {
		if err != nil {
			c.Error(err)
		}
	}
	for i, src := range c.sources {
		c.turns(uint64(10+i), func(rnd *rand.Rand, value byte) {
			var shown []func()
			c.each(rnd, byDevice, func(p page.Index) {
				shown = append(shown, c.stores(byDevice, i, p, value, func(at int) { device[i].store(at, value) }))
			})
			_, err := device[i].Release(context.Background(), 0, size)
			check(err)
			for _, f := range shown {
				f()
			}
		})
		c.turns(uint64(20+i), func(rnd *rand.Rand, value byte) {
			c.each(rnd, byCPU, func(p page.Index) {
				c.stores(byCPU, i, p, value, func(at int) {
					b := []byte{value}
					check(src.tryWrite(Change{Kind: ChangeWrite, Off: int64(at), Len: 1}, b))
				})()
			})
		})
		c.turns(uint64(30+i), func(rnd *rand.Rand, value byte) {
			switch {
			case c.seed%3 == 1 && value%8 != 0:
				// After a change in SOURCE, views copy nothing straight from devices for a while.
			case rnd.IntN(4) == 0 && src.disk == nil:
				src.home.resize((crowdPages + rnd.IntN(crowdTail)) * page.Size)
			default:
				c.each(rnd, inSource, func(p page.Index) {
					c.stores(inSource, i, p, value, func(at int) { src.editInSource(at, []byte{value}) })()
				})
			}
		})
		c.turns(uint64(50+i), func(rnd *rand.Rand, _ byte) {
			src.read(c.T, rnd.IntN(size), 1+rnd.IntN(100*page.Size))
			if rnd.IntN(4) == 0 {
				_ = src.attached.ChangeHome(context.Background(),
					Change{Kind: ChangeTruncate, Len: size + rnd.Int64N(crowdTail*page.Size)},
					func(n, _ int64) error { return src.backing().truncate(n) })
			}
			if rnd.IntN(8) == 0 {
				check(src.attached.Sync(context.Background(), func() error { return nil }))
			}
		})
	}
	c.turns(60, func(_ *rand.Rand, value byte) {
		g, err := c.m.cache.BeginGroup(context.Background(), group)
		if err != nil {
			c.Error(err)
			return
		}
		var shown []func()
		for i := range c.sources {
			for p := range page.Index(crowdPages) {
				if crowdWrites(byGroup, p) {
					shown = append(shown, c.stores(byGroup, i, p, value, func(at int) { grouped[i].store(at, value) }))
				}
			}
		}
		_, _, err = g.Release(context.Background())
		check(err)
		for _, f := range shown {
			f()
		}
	})
	for i := range 5 {
		c.view(i)
	}
	c.writers.Wait()
	end()
	c.others.Wait()
	for i := range c.sources {
		device[i].unmap()
		grouped[i].unmap()
	}
}

// request returns the request for a view of both files, or of parts of them.
func (c *crowd) request(number int) ViewRequest {
	var segments []view.Segment
	for i := range c.sources {
		switch number % 3 {
		case 0:
			segments = append(segments, view.Segment{File: i, Length: crowdPages * page.Size, Count: 1})
		case 1: // every other page
			segments = append(segments,
				view.Segment{File: i, Length: page.Size, Stride: 2 * page.Size, Count: crowdPages / 2})
		case 2: // the bytes that programs store
			segments = append(segments,
				view.Segment{File: i, Length: crowdBytes, Stride: page.Size, Count: crowdPages})
		}
	}
	return ViewRequest{Device: number % 3, Segments: segments, Alignment: 64 << number, Lazy: number == 3}
}

// view acquires a view again and again.
func (c *crowd) view(number int) {
	req := c.request(number)
	sources := c.sources[:]
	var v *viewer
	c.until(uint64(70+number), func(rnd *rand.Rand) {
		least := c.allowed(func(v *crowdValues, kind int) *[crowdPages]atomic.Int32 { return &v.least[kind] })
		var err error
		filled := v == nil && !req.Lazy
		if v == nil {
			v, err = c.m.tryView(req, sources...)
		}
		if err == nil && !filled {
			ended := make(chan struct{})
			if rnd.IntN(2) == 0 {
				file := rnd.IntN(2)
				reads := rnd.IntN(4) > 0 || c.seed%3 == 1 && rnd.IntN(4) > 0
				at := rnd.IntN(crowdPages)
				p := v.v.parts[file]
				c.others.Go(func() { c.during(p, file, ended, reads, at) })
			}
			_, err = v.Acquire(context.Background(), 0, v.Size(), false)
			close(ended)
		}
		if err != nil {
			c.Error(err)
			return
		}
		c.compare(v, req, least,
			c.allowed(func(v *crowdValues, kind int) *[crowdPages]atomic.Int32 { return &v.last[kind] }))
		if rnd.IntN(10) == 0 {
			v.unmap()
			v = nil
		}
	})
}

// during does something between the plan of a view's fill, which then waits, and its reads of a file's home: it reads
// the file in order, or sets its times in SOURCE and makes that known.
func (c *crowd) during(p *viewPart, file int, ended <-chan struct{}, reads bool, from int) {
	p.f.views.expect(1)
	defer p.f.views.expect(-1)
	if src := c.sources[file]; !c.fills(p, ended) {
		return
	} else if !reads {
		src.home.editAt(0, nil)
		if _, err := p.f.CheckHome(context.Background()); err != nil {
			c.Error(err)
		}
	} else {
		for at := from; at < crowdPages; at += 32 {
			src.read(c.T, at*page.Size, 32*page.Size)
		}
	}
}

// fills waits until a fill of the view has decided what to read from home. It returns false if the acquire ends first.
func (c *crowd) fills(p *viewPart, ended <-chan struct{}) bool {
	for {
		select {
		case <-ended:
			return false
		case <-time.After(10 * time.Microsecond):
		}
		p.f.views.mu.Lock()
		fills := p.shares != nil
		p.f.views.mu.Unlock()
		if fills {
			return true
		}
	}
}

// editInSource stores bytes directly in SOURCE, through the host's page cache.
func (s *source) editInSource(off int, p []byte) {
	if s.disk != nil {
		s.disk.mu.Lock()
		defer s.disk.mu.Unlock()
		s.disk.keep(int64(off), int64(len(p)))
	}
	s.home.editAt(off, p)
}

// crowdState has a value of each byte of both files.
type crowdState [2][crowdBytes][crowdPages]int32

func (c *crowd) allowed(of func(v *crowdValues, kind int) *[crowdPages]atomic.Int32) *crowdState {
	s := new(crowdState)
	for i, v := range c.values {
		for kind := byDevice; kind < crowdBytes; kind += byGroup {
			for p := range of(v, kind) {
				s[i][kind][p] = of(v, kind)[p].Load()
			}
		}
	}
	return s
}

// compare checks the bytes of a view.
func (c *crowd) compare(v *viewer, req ViewRequest, least, last *crowdState) {
	got, at := v.all(), int64(0)
	group, alignment := int32(-1), req.Alignment
	for _, s := range req.Segments {
		at = (at + alignment - 1) &^ (alignment - 1)
		for k := range s.Count {
			for b := int64(0); b < s.Length; b++ {
				off := s.Offset + k*s.Stride + b
				kind, p := int(off%page.Size), off>>page.Shift
				if kind >= crowdBytes || kind%byGroup != 0 {
					continue
				}
				x := int32(got[at+b])
				if x < least[s.File][kind][p] || x > last[s.File][kind][p] {
					c.Errorf("byte %d of page %d of file %d in the view on device %d is %d, not %d to %d", kind, p, s.File,
						v.Device().Ordinal, x, least[s.File][kind][p], last[s.File][kind][p])
					return
				}
				if kind == byGroup && crowdWrites(byGroup, page.Index(p)) {
					if group >= 0 && x != group {
						c.Errorf("page %d of file %d in the view on device %d is of version %d, others are of %d", p, s.File,
							v.Device().Ordinal, x, group)
						return
					}
					group = x
				}
			}
			at += s.Length
		}
	}
}

// TestViewsInRounds: as TestViewsBesideEverything, in rounds. In each, programs store and release, and then views are
// acquired. Everything else happens after the fills have decided what to read from home, and before they read it.
func TestViewsInRounds(t *testing.T) {
	for seed := range uint64(*atOnceFlag) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { newCrowd(t, 3*seed+1).rounds() })
	}
}

func (c *crowd) rounds() {
	ctx, rnd := context.Background(), rand.New(rand.NewPCG(c.seed, 1))
	c.m.cache.gather = func(int64) time.Duration { return time.Minute }
	const size = crowdPages * page.Size
	var device, grouped [2]*program
	var group []GroupRange
	for i, src := range c.sources {
		device[i], grouped[i] = c.m.run(src, 0, 0, size, true), c.m.run(src, 1, 0, size, true)
		group = append(group, GroupRange{grouped[i].Mapping, 0, size})
	}
	var views []*viewer
	var requests []ViewRequest
	for i := range 4 {
		requests = append(requests, c.request(i))
		views = append(views, c.m.view(requests[i], c.sources[:]...))
	}
	for value := byte(1); value <= crowdTurns && !c.Failed(); value++ {
		for i, src := range c.sources {
			c.each(rnd, byCPU, func(p page.Index) {
				c.stores(byCPU, i, p, value, func(at int) { src.write(c.T, at, []byte{value}) })()
			})
			c.each(rnd, byDevice, func(p page.Index) {
				c.stores(byDevice, i, p, value, func(at int) { device[i].store(at, value) })()
			})
			device[i].release()
		}
		if rnd.IntN(2) == 0 {
			g, err := c.m.cache.BeginGroup(ctx, group)
			require.NoError(c, err)
			for i := range c.sources {
				for p := range page.Index(crowdPages) {
					if crowdWrites(byGroup, p) {
						c.stores(byGroup, i, p, value, func(at int) { grouped[i].store(at, value) })()
					}
				}
			}
			_, _, err = g.Release(ctx)
			require.NoError(c, err)
		}
		least := c.allowed(func(v *crowdValues, kind int) *[crowdPages]atomic.Int32 { return &v.least[kind] })
		for _, src := range c.sources {
			src.attached.views.expect(1)
		}
		var group sync.WaitGroup
		var acquires []int
		for i, v := range views {
			if rnd.IntN(2) == 0 {
				continue
			}
			acquires = append(acquires, i)
			ended := make(chan struct{})
			group.Go(func() {
				defer close(ended)
				if _, err := v.Acquire(ctx, 0, v.Size(), false); err != nil {
					c.Error(err)
				}
			})
			c.fills(v.v.parts[0], ended)
		}
		for i, src := range c.sources {
			for range rnd.IntN(3) {
				c.event(rnd, src, i, value)
			}
			src.attached.views.expect(-1)
		}
		group.Wait()
		last := c.allowed(func(v *crowdValues, kind int) *[crowdPages]atomic.Int32 { return &v.last[kind] })
		for _, i := range acquires {
			c.compare(views[i], requests[i], least, last)
		}
	}
	for i := range c.sources {
		device[i].unmap()
		grouped[i].unmap()
	}
}

// event is something that happens during a fill.
func (c *crowd) event(rnd *rand.Rand, src *source, file int, value byte) {
	switch rnd.IntN(6) {
	case 0:
		src.home.editAt(0, nil) // the times
		_, err := src.attached.CheckHome(context.Background())
		require.NoError(c, err)
	case 1:
		c.each(rnd, byCPU, func(p page.Index) {
			c.stores(byCPU, file, p, value, func(at int) { src.write(c.T, at, []byte{value}) })()
		})
	case 2:
		src.truncate(c.T, (crowdPages+rnd.Int64N(crowdTail))*page.Size)
	case 3:
		require.NoError(c, src.attached.Sync(context.Background(), func() error { return nil }))
	default:
		for at := rnd.IntN(crowdPages); at < crowdPages; at += 32 {
			src.read(c.T, at*page.Size, 32*page.Size)
		}
	}
}
