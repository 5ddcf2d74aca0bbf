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
	playTime   = 4 * time.Second
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
	g, err := p.d.Grant(ctx, []Want{p.want(p.at, p.at+p.bracket)}, Asking{By: p.by, Client: p.client, Patience: time.Minute})
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

// run plays until playTime.
func (v *play) run() {
	v.link, v.gpu = make(chan struct{}, 1), make(chan struct{}, 1)
	ctx, cancel := context.WithTimeout(v.t.Context(), playTime)
	defer cancel()
	var all sync.WaitGroup
	for i, p := range v.programs {
		p.client = Client(i + 1)
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

// TestProgramsAreServedAlike: eight programs share a device that has memory for three of them. Those that do the same
// get the same done, under every rule: if none pauses, if half of them pause after each bracket, with brackets of
// everything or of parts, as one tenant or as eight. The log also has the throughput against one after the other.
func TestProgramsAreServedAlike(t *testing.T) {
	for _, rule := range policy.Names() {
		for _, c := range []struct {
			name    string
			bracket page.Index
			pause   time.Duration // of every other program
			tenants uint32
		}{
			{"whole", 8, 0, 1},
			{"whole, tenants", 8, 0, 8},
			{"parts", 1, 0, 1},
			{"parts, tenants", 2, 0, 8},
			{"whole, pauses", 8, 3 * time.Millisecond, 1},
			{"parts, pauses", 1, 3 * time.Millisecond, 1},
			{"parts, pauses, tenants", 1, 3 * time.Millisecond, 8},
		} {
			t.Run(rule+"/"+c.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { playFair(t, rule, c.bracket, c.pause, c.tenants) })
			})
		}
	}
}

func playFair(t *testing.T, rule string, bracket page.Index, pause time.Duration, accounts uint32) {
	d, _ := newPinnedDevice(t, 24, *pinnedInPlay)
	d.SetQuantum(*quantumInPlay)
	require.NoError(t, d.SetEviction(rule))
	v := &play{t: t}
	var groups [2][]*player
	for i := range uint32(8) {
		user := 1000 + i%accounts
		p := &player{key: newKey(t, d), pages: 8, bracket: bracket,
			by: Tenant{User: user, Account: tenants.User(user)}, pause: time.Duration(i%2) * pause}
		v.programs, groups[i%2] = append(v.programs, p), append(groups[i%2], p)
	}
	v.run()
	used := 0
	for _, p := range v.programs {
		used += p.done * int(p.bracket)
	}
	t.Logf("%d extents were used, %d moved; %.2f of one after the other; Jain's index %.3f, %.3f and %.3f; longest wait %v; %d and %d done; %+v", used, v.moved.Load(),
		float64(used)*kernelTime.Seconds()/playTime.Seconds(), jain(v.programs), jain(groups[0]), jain(groups[1]), time.Duration(v.longest.Load()), total(groups[0]), total(groups[1]), d.Status().Quanta)
	require.Greater(t, jain(groups[0]), 0.95)
	require.Greater(t, jain(groups[1]), 0.95)
	if pause == 0 {
		require.Greater(t, jain(v.programs), 0.95)
	}
}

var (
	quantumInPlay = flag.Duration("quantum", DefaultQuantum, "the longest quantum in TestProgramsAreServedAlike")
	pinnedInPlay  = flag.Int64("pinned", 0, "extents of pinned memory in TestProgramsAreServedAlike")
)

func total(programs []*player) (n int) {
	for _, p := range programs {
		n += p.done
	}
	return n
}
