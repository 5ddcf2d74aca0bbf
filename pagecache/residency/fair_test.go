package residency

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// play has programs share a device in simulated time. Only the Device is real: it decides what leaves, and whether a
// bracket fits. Copies take turns on the link, and kernels on the GPU.
type play struct {
	t         *testing.T
	programs  []*player
	waiting   []*player // in order of arrival
	link, gpu time.Duration
	moved     int
}

// player is a program that uses brackets of so many granules of its own file in turn, and then begins anew.
type player struct {
	*key
	by      Tenant
	pages   page.Index // of the file, in granules
	bracket page.Index // granules that it uses at once
	pause   time.Duration
	at      page.Index
	next    time.Duration // when it asks, or its bracket ends
	grant   *Grant        // nil: it asks next
	done    int
}

const (
	swapTime   = 600 * time.Microsecond // of an extent: its copy, and calls of the driver
	kernelTime = 200 * time.Microsecond // of an extent
	playTime   = 4 * time.Second
)

func (p *player) present() (list []*Extent) {
	for _, x := range p.Extents(granules(p.at, p.at+p.bracket)) {
		if x.Placement().Tier == TierVRAM {
			list = append(list, x)
		}
	}
	return list
}

// ask begins a bracket, or returns false if it would have to wait.
func (v *play) ask(p *player, now time.Duration) bool {
	before := p.present()
	g, err := p.d.Grant(context.Background(), []Want{p.want(p.at, p.at+p.bracket)}, Asking{By: p.by, Nested: true})
	if errors.Is(err, syscall.EDEADLK) {
		return false
	}
	require.NoError(v.t, err)
	missing := len(slices.DeleteFunc(p.present(), func(x *Extent) bool { return slices.Contains(before, x) }))
	if missing > 0 {
		v.moved += missing
		v.link = max(v.link, now) + time.Duration(missing)*swapTime
		now = v.link
	}
	v.gpu = max(v.gpu, now) + time.Duration(p.bracket)*kernelTime
	p.grant, p.next = g, v.gpu
	return true
}

// run plays until playTime.
func (v *play) run() {
	for {
		var p *player
		for _, q := range v.programs {
			if !slices.Contains(v.waiting, q) && (p == nil || q.next < p.next) {
				p = q
			}
		}
		now := p.next
		if now >= playTime {
			break
		}
		if p.grant == nil {
			if len(v.waiting) > 0 || !v.ask(p, now) {
				v.waiting = append(v.waiting, p)
			}
			continue
		}
		p.grant.Free()
		p.grant, p.at, p.next = nil, (p.at+p.bracket)%p.pages, now+p.pause
		p.done++
		for len(v.waiting) > 0 && v.ask(v.waiting[0], now) {
			v.waiting = v.waiting[1:]
		}
	}
	for _, p := range v.programs {
		if p.grant != nil {
			p.grant.Free()
		}
	}
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
				d, _ := newPinnedDevice(t, 24, 0)
				require.NoError(t, d.SetEviction(rule))
				v := &play{t: t}
				var groups [2][]*player
				for i := range uint32(8) {
					user := 1000 + i%c.tenants
					p := &player{key: newKey(t, d), pages: 8, bracket: c.bracket,
						by: Tenant{User: user, Account: tenants.User(user)}, pause: time.Duration(i%2) * c.pause}
					v.programs, groups[i%2] = append(v.programs, p), append(groups[i%2], p)
				}
				v.run()
				used := 0
				for _, p := range v.programs {
					used += p.done * int(p.bracket)
				}
				t.Logf("%d extents were used, %d moved; %.2f of one after the other; Jain's index %.3f", used, v.moved,
					float64(used)*kernelTime.Seconds()/playTime.Seconds(), jain(v.programs))
				require.Greater(t, jain(groups[0]), 0.99)
				require.Greater(t, jain(groups[1]), 0.99)
				if c.pause == 0 {
					require.Greater(t, jain(v.programs), 0.99)
				}
			})
		}
	}
}
