package residency

import (
	"context"
	"flag"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// play has programs share a device in simulated time. Only the Device is real. Copies take turns on the link, and
// kernels on the GPU.
type play struct {
	t         *testing.T
	time      time.Duration
	programs  []*player
	link, gpu chan struct{}
	moved     atomic.Int64
	longest   atomic.Int64 // wait for a bracket
}

// player is a program that uses brackets of so many granules of its own file in turn, and then begins anew.
type player struct {
	*key
	by      Tenant
	client  Client
	pages   page.Index // of the file, in granules
	bracket page.Index // granules that it uses at once
	pause   time.Duration
	at      page.Index
	done    int
}

const (
	swapTime   = 600 * time.Microsecond // of an extent: its copy, and calls of the driver
	kernelTime = 200 * time.Microsecond // of an extent
	busTime    = 2 * time.Millisecond   // of a kernel on an extent in pinned memory
)

// present returns the extents of the next bracket that are in a tier.
func (p *player) present(in Tier) (list []*Extent) {
	for _, x := range p.Extents(granules(p.at, p.at+p.bracket)) {
		if x.Placement().Tier == in {
			list = append(list, x)
		}
	}
	return list
}

// occupy uses the link or the GPU for a while.
func occupy(what chan struct{}, n int, each time.Duration) {
	if n > 0 {
		what <- struct{}{}
		time.Sleep(time.Duration(n) * each)
		<-what
	}
}

// use is one bracket.
func (v *play) use(ctx context.Context, p *player) error {
	before, began := p.present(TierVRAM), time.Now()
	g, err := p.d.Grant(ctx, []Want{p.want(p.at, p.at+p.bracket)},
		Asking{By: p.by, Client: p.client, Patience: time.Minute})
	if err != nil {
		return err
	}
	if took := int64(time.Since(began)); took > v.longest.Load() {
		v.longest.Store(took)
	}
	missing := slices.DeleteFunc(p.present(TierVRAM), func(x *Extent) bool { return slices.Contains(before, x) })
	v.moved.Add(int64(len(missing)))
	occupy(v.link, len(missing), swapTime)
	g.Ready()
	occupy(v.gpu, len(p.present(TierVRAM)), kernelTime)
	occupy(v.gpu, len(p.present(TierHost)), busTime)
	g.Free()
	p.at = (p.at + p.bracket) % p.pages
	p.done++
	time.Sleep(p.pause)
	return nil
}

// run plays until v.time.
func (v *play) run() {
	ctx, cancel := context.WithTimeout(v.t.Context(), v.time)
	defer cancel()
	var all sync.WaitGroup
	for _, p := range v.programs {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := v.use(ctx, p); err != nil {
					require.ErrorIs(v.t, err, context.DeadlineExceeded)
				}
			}
		})
	}
	all.Wait()
}

// jain returns Jain's index of what programs got done: 1 if all are equal, 1/n if one got everything.
func jain(programs []*player) float64 {
	sum, squares := 0.0, 0.0
	for _, p := range programs {
		sum += float64(p.done)
		squares += float64(p.done) * float64(p.done)
	}
	return sum * sum / (float64(len(programs)) * squares)
}

// stage is what the programs of a play share and do.
type stage struct {
	name    string
	bracket page.Index    // in granules
	pause   time.Duration // of every other program
	all     bool          // of every program
	tenants uint32
	pinned  int64 // granules
	dirty   bool  // what leaves goes to pinned memory
	pages   page.Index
}

// TestProgramsAreServedAlike: eight programs share a device that has memory for three of them. Those that do the same
// get the same done, under every rule: if none pauses, if half or all of them pause after each bracket, with brackets
// of everything or of parts, as one tenant or as eight. The log also has the throughput against one after the other.
// With a quantum, programs of one tenant that do not pause get nearly as much done as one after the other; without
// (-quantum 0) a third.
func TestProgramsAreServedAlike(t *testing.T) {
	const pause = 3 * time.Millisecond
	for _, rule := range policy.Names() {
		for _, c := range []stage{
			{name: "whole", bracket: 8, tenants: 1},
			{name: "whole, tenants", bracket: 8, tenants: 8},
			{name: "whole, pinned", bracket: 8, tenants: 1, pinned: 64},
			{name: "parts", bracket: 1, tenants: 1},
			{name: "parts, pinned", bracket: 1, tenants: 1, pinned: 64},
			{name: "parts, dirty", bracket: 1, tenants: 1, pinned: 64, dirty: true},
			{name: "parts, large", bracket: 1, tenants: 1, pages: 72, pinned: 600, dirty: true},
			{name: "parts, tenants", bracket: 2, tenants: 8},
			{name: "whole, pauses", bracket: 8, pause: pause, tenants: 1},
			{name: "parts, pauses", bracket: 1, pause: pause, tenants: 1},
			{name: "parts, pauses, tenants", bracket: 1, pause: pause, tenants: 8},
			{name: "parts, all pause", bracket: 1, pause: pause, all: true, tenants: 1},
			{name: "parts, all pause, dirty", bracket: 1, pause: pause, all: true, tenants: 1, pinned: 64, dirty: true},
		} {
			if c.pinned > 0 && rule != "lru" { // these take long, and the rule hardly matters
				continue
			}
			t.Run(rule+"/"+c.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { playOn(t, rule, c) })
			})
		}
	}
}

// testQuantum is the longest quantum in tests.
const testQuantum = 100 * time.Millisecond

var quantumOfPlay = flag.Duration("quantum", testQuantum, "the longest quantum in TestProgramsAreServedAlike")

func playOn(t *testing.T, rule string, c stage) {
	d, _ := newPinnedDevice(t, 24, c.pinned)
	d.SetQuantum(*quantumOfPlay)
	require.NoError(t, d.SetEviction(rule))
	v := &play{t: t, time: 3 * time.Second / 2, link: make(chan struct{}, 1), gpu: make(chan struct{}, 1)}
	if rule == "lru" { // the figures in docs/dev/measurements.md
		v.time = 4 * time.Second
	}
	var groups [2][]*player
	for i := range uint32(8) {
		user := 1000 + i%c.tenants
		p := &player{key: newKey(t, d), client: Client(i + 1), pages: max(c.pages, 8), bracket: c.bracket,
			by: Tenant{User: user, Account: tenants.User(user)}, pause: time.Duration(i%2) * c.pause}
		if c.all {
			p.pause = c.pause
		}
		if c.dirty {
			p.moves = func() { occupy(v.link, 1, swapTime/2) }
		}
		v.programs, groups[i%2] = append(v.programs, p), append(groups[i%2], p)
	}
	v.run()
	speed := float64(total(v.programs)) * float64(c.bracket) * kernelTime.Seconds() / v.time.Seconds()
	longest := time.Duration(v.longest.Load())
	t.Logf("%.2f of one after the other; %d and %d brackets; %d extents moved; Jain's index %.3f, %.3f and %.3f; "+
		"longest wait %v, %+v", speed, total(groups[0]), total(groups[1]), v.moved.Load(), jain(v.programs),
		jain(groups[0]), jain(groups[1]), longest, d.Status().Quanta)
	require.Greater(t, jain(groups[0]), 0.95)
	require.Greater(t, jain(groups[1]), 0.95)
	if c.pause == 0 {
		require.Greater(t, jain(v.programs), 0.95)
	}
	if *quantumOfPlay == testQuantum {
		require.Less(t, longest, 3*testQuantum/2)
		if c.pause == 0 && c.tenants == 1 && c.pages == 0 {
			require.Greater(t, speed, 0.7)
		}
	}
}

// total returns how many brackets programs had.
func total(programs []*player) (n int) {
	for _, p := range programs {
		n += p.done
	}
	return n
}
