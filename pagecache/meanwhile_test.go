package pagecache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/home"
)

// meanwhile makes the next read of home find a byte that was stored in SOURCE after the mount last looked. With unseen
// no look can notice it: the mount was changing the file itself at that moment.
func (h *memoryHome) meanwhile(off int, b byte, unseen bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.beforeRead = func(page.Bytes) {
		h.beforeRead = nil
		h.editUnseen(off, b, unseen)
	}
}

// editUnseen is called with mu held.
func (h *memoryHome) editUnseen(off int, b byte, unseen bool) {
	if !unseen {
		h.clock++
	}
	h.data[off] = b
}

// TestChangesWhileTheMountChangesHome stores a byte in SOURCE between the look and the read of a base, for each way to
// change home. No device undoes it.
func TestChangesWhileTheMountChangesHome(t *testing.T) {
	const size, at = 3*page.Size + 100, page.Size + 20 // where SOURCE is changed
	type change struct {
		name string
		at   int
		do   func(t *testing.T, src *source, want []byte) []byte
	}
	write := func(off, n int) func(t *testing.T, src *source, want []byte) []byte {
		return func(t *testing.T, src *source, want []byte) []byte {
			b := slices.Repeat([]byte{7}, n)
			src.write(t, off, b)
			want = append(want, make([]byte, max(off+n-len(want), 0))...)
			copy(want[off:], b)
			return want
		}
	}
	for _, c := range []change{
		{"write of a page", at, write(page.Size+40, 3)},
		{"write of pages", at, write(100, page.Size-90)},
		{"append", size - 10, write(size, 3)},
		{"write behind the end", size - 10, write(5*page.Size, 3)},
		{"zeros", at, func(t *testing.T, src *source, want []byte) []byte {
			zeros := make([]byte, 30)
			require.NoError(t, src.tryWrite(Change{Kind: ChangeZero, Off: page.Size + 50, Len: 30}, zeros))
			copy(want[page.Size+50:], zeros)
			return want
		}},
		{"truncate", at, func(t *testing.T, src *source, want []byte) []byte {
			src.truncate(t, page.Size+50)
			return want[:page.Size+50]
		}},
		{"truncate to more", size - 10, func(t *testing.T, src *source, want []byte) []byte {
			src.truncate(t, size+100)
			return append(want, make([]byte, 100)...)
		}},
		{"release", at, func(_ *testing.T, _ *source, want []byte) []byte { return want }},
	} {
		for _, unseen := range []bool{false, true} {
			for _, stores := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, unseen %v, stores %v", c.name, unseen, stores), func(t *testing.T) {
					m := newMachine(t, 2)
					src := m.noisyFile(size)
					p, q := m.run(src, 0, 0, 6*page.Size, true), m.run(src, 1, 0, 6*page.Size, true)
					before := src.home.bytes(0, size)
					want := slices.Clone(before)
					var stored []int
					if stores || c.name == "release" {
						stored = []int{page.Size + 12, 3*page.Size + 12}
					}
					for _, off := range stored {
						p.add(off)
					}
					if c.name == "release" {
						p.release()
					}
					want[c.at]++
					src.home.meanwhile(c.at, want[c.at], unseen)
					want = c.do(t, src, want)
					require.NoError(t, src.attached.Sync(context.Background(), nil))
					require.Nil(t, src.home.beforeRead)
					for range 2 {
						for _, x := range []*program{p, q} {
							x.release()
							x.acquire()
						}
					}
					require.NoError(t, src.attached.Sync(context.Background(), nil))
					for _, off := range stored {
						if off < len(want) {
							want[off] = before[off] + 1
						}
					}
					requireSame(t, want, src.home.bytes(0, len(src.home.data)))
					for _, x := range []*program{p, q} {
						requireSame(t, want, x.load(0, len(want)))
					}
					require.Zero(t, m.baseless())
				})
			}
		}
	}
}

// TestChangesInSourceWhileADeviceIsRead changes a page in SOURCE after a collect has looked at home, and before it
// writes the page: while it waits for the device, and while it writes the portion before.
func TestChangesInSourceWhileADeviceIsRead(t *testing.T) {
	const pages = collectPortion + 1
	for _, based := range []bool{false, true} {
		for _, at := range []int{0, collectPortion} { // a page of the first portion, or of the second
			t.Run(fmt.Sprintf("page %d, based %v", at, based), func(t *testing.T) {
				m := newMachine(t, 1)
				src := m.file(pages * page.Size)
				p := m.run(src, 0, 0, pages*page.Size, true)
				want := make([]byte, pages*page.Size)
				for i := range pages {
					p.store(i*page.Size, 1)
					want[i*page.Size] = 1
				}
				off := at * page.Size
				if based {
					src.write(t, off+8, []byte{2})
					want[off+8] = 2
				}
				p.release()
				synced := make(chan error, 1)
				sync := func() { go func() { synced <- src.attached.Sync(context.Background(), nil) }() }
				edit := func() {
					src.home.editAt(off+20, []byte{3})
					want[off+20] = 3
				}
				if at == 0 {
					gate := m.devices[0].Hold(faulty.CopyOut)
					sync()
					<-gate.Arrived()
					edit()
					gate.Open()
				} else {
					hung := make(chan struct{})
					src.home.hung = hung
					sync()
					require.Eventually(t, func() bool { return m.devices[0].Calls(faulty.CopyOut) >= 2 }, time.Minute,
						time.Millisecond)
					edit()
					close(hung)
				}
				require.NoError(t, <-synced)
				requireSame(t, want, src.home.bytes(0, len(want)))
				p.acquire()
				requireSame(t, want, p.all())
				require.Zero(t, m.baseless())
			})
		}
	}
}

// TestChangesInSourceBetweenWrites changes a page in SOURCE while a collect writes the pages before it: many of them,
// or one for a long time.
func TestChangesInSourceBetweenWrites(t *testing.T) {
	for name, last := range map[string]int{"many": home.WriteSize + page.Size, "long": 2 * page.Size} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2)
			size := last + page.Size
			src := m.noisyFile(size)
			p, q := m.run(src, 0, 0, int64(size), true), m.run(src, 1, 0, int64(size), true)
			want := src.home.bytes(0, size)
			for at := 0; at <= last; at += page.Size {
				if at != last-page.Size {
					p.add(at)
					want[at]++
				}
			}
			p.release()
			hung, synced := make(chan struct{}), make(chan error, 1)
			src.home.hung = hung
			go func() { synced <- src.attached.Sync(context.Background(), nil) }()
			require.Eventually(t, func() bool { return src.home.waiting.Load() > 0 }, time.Minute, time.Millisecond)
			for _, at := range []int{20, last + 20} {
				want[at]++
				src.home.editAt(at, want[at:at+1])
			}
			if name == "long" {
				outlastLook()
			}
			close(hung)
			require.NoError(t, <-synced)
			want[20]-- // stored between the look and the write, which nothing protects
			requireSame(t, want, src.home.bytes(0, len(want)))
			for _, x := range []*program{p, q} {
				x.acquire()
				requireSame(t, want, x.all())
			}
			require.Zero(t, m.baseless())
		})
	}
}

// outlastLook returns when a write that has begun is the last one before home is looked at again.
func outlastLook() {
	for start := time.Now(); time.Since(start) < home.LookAgain; {
	}
}

// TestCollectsOfManyDevicesLookAgain: a page that several devices released is brought home in one turn for each device.
// The last turn looks at home before each of its writes, too.
func TestCollectsOfManyDevicesLookAgain(t *testing.T) {
	const devices = carefulTries + 1
	m := newMachine(t, devices)
	src := m.noisyFile(3 * page.Size)
	want := src.home.bytes(0, 3*page.Size)
	var programs []*program
	for d := range devices {
		programs = append(programs, m.run(src, d, 0, 3*page.Size, true))
	}
	for d, p := range programs {
		for _, at := range []int{4 * d, 2*page.Size + 4*d} {
			p.add(at)
			want[at]++
		}
		p.release()
	}
	gate := m.devices[devices-1].Hold(faulty.CopyOut)
	synced := make(chan error, 1)
	go func() { synced <- src.attached.Sync(context.Background(), nil) }()
	<-gate.Arrived()
	hung := make(chan struct{})
	src.home.hung = hung
	gate.Open()
	require.Eventually(t, func() bool { return src.home.waiting.Load() > 0 }, time.Minute, time.Millisecond)
	at := 2*page.Size + 100
	want[at]++
	src.home.editAt(at, want[at:at+1])
	outlastLook()
	close(hung)
	require.NoError(t, <-synced)
	requireSame(t, want, src.home.bytes(0, len(want)))
	for _, p := range programs {
		p.acquire()
		requireSame(t, want, p.all())
	}
	require.Zero(t, m.baseless())
}

// TestSizesOfOthersWhileAWriteBringsPagesHome makes the file longer or shorter in SOURCE while a CPU program's request
// brings released bytes home.
func TestSizesOfOthersWhileAWriteBringsPagesHome(t *testing.T) {
	const size = 2*page.Size + 100
	for _, other := range []int{3*page.Size + 50, page.Size + 50} {
		for name, c := range map[string]Change{
			"write":        {Kind: ChangeWrite, Off: 8, Len: 1},
			"longer write": {Kind: ChangeWrite, Off: 8, Len: 4 * page.Size},
			"append":       {Kind: ChangeAppend, Len: 1},
			"allocate":     {Kind: ChangeAllocate, Len: 1},
		} {
			t.Run(fmt.Sprintf("%s, %d", name, other), func(t *testing.T) {
				m := newMachine(t, 1)
				src := m.noisyFile(size)
				p := m.run(src, 0, 0, 6*page.Size, true)
				for _, at := range []int{0, page.Size, 2 * page.Size} {
					p.add(at)
				}
				p.release()
				gate := m.devices[0].Hold(faulty.CopyOut)
				wrote := make(chan error, 1)
				bytes := slices.Repeat([]byte{7}, int(c.Len))
				if c.Kind == ChangeAllocate {
					bytes = nil
				}
				go func() { wrote <- src.tryWrite(c, bytes) }()
				<-gate.Arrived()
				src.home.resize(other)
				src.home.editAt(other-10, []byte{9})
				gate.Open()
				require.NoError(t, <-wrote)
				p.acquire()
				all := src.home.bytes(0, len(src.home.data))
				p.store(len(all)-1, 66)
				p.release()
				require.NoError(t, src.attached.Sync(t.Context(), nil))
				require.Equal(t, []byte{66}, src.home.bytes(len(all)-1, 1))
				all[len(all)-1] = 66
				requireSame(t, all, p.load(0, len(all)))
				require.Zero(t, p.byteAt(len(all)))
			})
		}
	}
}

// TestCollectsEndWhileSourceChanges: constant changes in SOURCE do not keep released bytes from coming home.
func TestCollectsEndWhileSourceChanges(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 1)
	p.release()
	src.home.editAt(page.Size, []byte{1})
	changes := 0
	src.home.beforeRead = func(page.Bytes) { // each look compares pages with home
		changes++
		src.home.editUnseen(page.Size, byte(changes), false)
	}
	require.NoError(t, src.attached.Sync(t.Context(), nil))
	require.Greater(t, changes, 1)
	require.Equal(t, []byte{1}, src.home.bytes(0, 1))
}

// TestRandomMeanwhile: the CPU, two devices and a writer in SOURCE change a file, each at its own bytes. The writer in
// SOURCE does so in the middle of the other changes, whenever home is read.
func TestRandomMeanwhile(t *testing.T) {
	const pages, steps, few = 12, 1500, 6
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	c := newContest(t, pages)
	src, want := c.src, c.want
	// The background brings replicas up to date too, so src.home.mu protects the state of the writer in SOURCE: its
	// callback is called with it held.
	others, chance := rand.New(rand.NewPCG(seed, 2)), 0
	foreign := make([]byte, len(want))
	// changes counts the changes by devices and in SOURCE since everything was home and known. After too many of them
	// the base of a page cannot be found.
	var changes [pages]int
	src.home.beforeRead = func(read page.Bytes) {
		if rg := read.Intersect(page.Bytes{End: pages * page.Size}); !rg.Empty() && others.IntN(4) < chance {
			at := (int(rg.Off)+others.IntN(int(rg.Len())))&^3 + 3
			if p := at / page.Size; changes[p] < few {
				changes[p]++
				foreign[at] = byte(1 + others.IntN(255))
				src.home.editUnseen(at, foreign[at], false)
			}
		}
	}
	another := func(at int) bool {
		src.home.mu.Lock()
		defer src.home.mu.Unlock()
		changes[at/page.Size]++
		return changes[at/page.Size] <= few
	}
	edit := func(most int) {
		src.home.mu.Lock()
		defer src.home.mu.Unlock()
		chance = most
	}
	for range steps {
		at := rnd.IntN(pages*page.Size/4) * 4
		b := byte(1 + rnd.IntN(255))
		edit(rnd.IntN(3))
		switch d := rnd.IntN(2); rnd.IntN(8) {
		case 0, 1:
			src.write(t, at, []byte{b})
			want[at] = b
		case 2, 3:
			if another(at) {
				c.programs[d].store(at+1+d, b)
				c.stored[d][at+1+d] = b
			}
		case 4:
			c.release(d)
		case 5:
			c.programs[d].acquire()
		case 6:
			c.release(d)
			c.release(1 - d)
			require.NoError(t, src.attached.Sync(context.Background(), nil))
			src.attached.mu.Lock()
			src.home.mu.Lock()
			for p := range page.Index(pages) {
				if !src.attached.doubtfulLocked(page.Range{Start: p, End: p + 1}) {
					changes[p] = 0
				}
			}
			src.home.mu.Unlock()
			src.attached.mu.Unlock()
		case 7:
			require.Equal(t, want[at], src.read(t, at, 1)[0])
		}
	}
	edit(0)
	for at := 3; at < len(want); at += 4 {
		want[at] = foreign[at]
	}
	c.requireEnd(t)
}
