package pagecache

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

var keepFor = flag.Duration("kept", time.Second, "how long TestRandomKeepers runs")

// keepingClient keeps brackets as the C library does: later brackets join, and a recall ends those without users.
type keepingClient struct {
	*traveller
	old   bool
	mu    sync.Mutex
	table map[[2]int]*keptBracket // by range; protected by mu
	wild  atomic.Bool             // claims absurd uses, and answers late or not at all
}

// keptBracket is a client's bracket. keepingClient.mu protects it.
type keptBracket struct {
	*Bracket
	users, joined int
	ending        bool
}

func (c *keepingClient) Counts() bool { return !c.old }

func (c *keepingClient) finish(b *keptBracket) {
	if c.wild.Load() {
		b.Used(rand.Uint32())
	} else {
		b.Used(uint32(b.joined))
	}
	b.Done()
}

func (c *keepingClient) Recall() (func(ctx context.Context) error, error) {
	wild := c.wild.Load()
	if wild && rand.IntN(4) == 0 {
		return nil, errors.New("no service connection")
	}
	ended := make(chan struct{})
	c.thread.Go(func() {
		defer close(ended)
		if wild {
			time.Sleep(rand.N(20 * time.Millisecond))
		}
		for _, b := range c.take() {
			c.finish(b)
		}
	})
	return until(ended), nil
}

// take empties the table, and returns the brackets without users. The last user of each other one ends it.
func (c *keepingClient) take() (idle []*keptBracket) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for rg, b := range c.table {
		delete(c.table, rg)
		if b.ending = true; b.users == 0 {
			idle = append(idle, b)
		}
	}
	return idle
}

// within calls do in a bracket of extents [from, to).
func (c *keepingClient) within(from, to int, o UseOptions, do func()) error {
	rg := [2]int{from, to}
	c.mu.Lock()
	b := c.table[rg]
	if b != nil {
		b.users++
		b.joined++
	}
	c.mu.Unlock()
	if b == nil {
		o.Keeper = c
		got, err := c.m.cache.Use(context.Background(), []Use{c.over(from, to)}, o)
		if err != nil {
			return err
		}
		b = &keptBracket{Bracket: got, users: 1, ending: true}
		c.mu.Lock()
		if got.Kept() && c.table[rg] == nil {
			b.ending, c.table[rg] = false, b
		}
		c.mu.Unlock()
	}
	do()
	c.mu.Lock()
	b.users--
	last := b.users == 0 && b.ending
	c.mu.Unlock()
	if last {
		c.finish(b)
	}
	return nil
}

// TestRandomKeepers: clients keep brackets, claim uses, answer late and end, while the eviction rule, the placement and
// the budget change. Every bracket is granted in the end, and has its bytes. go test ./pagecache -run TestRandomKeepers
// -kept 2m runs for longer.
func TestRandomKeepers(t *testing.T) {
	testdevice.Emulated(t, "clients map memory in this process")
	const (
		extents = 6 // of a file
		threads = 2 // of a client; each stores into extents of its own
	)
	m := newMovingMachine(t, 2, 6, 2)
	shared := m.noisyFile(extents * brick)
	whole := append([]byte(nil), shared.home.data...)
	until := time.Now().Add(*keepFor)
	var all sync.WaitGroup
	client := func(n int, file *source) {
		bytes := append([]byte(nil), file.home.data...)
		for life := 0; time.Now().Before(until) && !t.Failed(); life++ {
			// The two clients of a device share a file, so they are of one user.
			req := MapRequest{Writable: true, Len: extents * brick, User: uint32(n % 2)}
			own := &keepingClient{traveller: m.travelAs(file, n%2, req), old: n == 3, table: map[[2]int]*keptBracket{}}
			req.Writable = false
			both := &keepingClient{traveller: m.travelAs(shared, n%2, req), table: map[[2]int]*keptBracket{}}
			own.wild.Store((n+life)%2 == 0)
			end := time.Now().Add(rand.N(300 * time.Millisecond))
			var running sync.WaitGroup
			for k := range threads {
				running.Go(func() {
					for time.Now().Before(end) && !t.Failed() {
						at := k*extents/threads + rand.IntN(extents/threads)
						o := UseOptions{Patience: time.Minute}
						err := own.within(at, at+1, o, func() {
							if i := at*brick + rand.IntN(brick); own.host[i] != bytes[i] {
								t.Errorf("client %d: byte %d is %d, not %d", n, i, own.host[i], bytes[i])
							} else if rand.IntN(2) == 0 {
								bytes[i]++
								own.host[i]++
							}
							o.Nested = true
							if rand.IntN(4) > 0 {
								return
							}
							from := rand.IntN(extents - 1)
							err := both.within(from, from+1+rand.IntN(2), o, func() {
								if i := from*brick + rand.IntN(brick); both.host[i] != whole[i] {
									t.Errorf("client %d: shared byte %d is %d, not %d", n, i, both.host[i], whole[i])
								}
							})
							if err != nil && !errors.Is(err, syscall.EDEADLK) {
								t.Errorf("client %d: a nested bracket: %v", n, err)
							}
						})
						if err != nil {
							t.Errorf("client %d: %v", n, err)
						}
					}
				})
			}
			running.Wait()
			own.releases()
			for _, c := range []*keepingClient{own, both} {
				for _, b := range c.take() {
					b.Done()
				}
				c.end()
			}
		}
	}
	for n := range 4 {
		file := m.noisyFile(extents * brick)
		all.Go(func() { client(n, file) })
	}
	all.Go(func() {
		for time.Now().Before(until) {
			time.Sleep(rand.N(5 * time.Millisecond))
			switch rand.IntN(8) {
			case 0:
				_ = m.cache.SetBudget(t.Context(), int64(3+rand.IntN(4))*brick, "")
			case 1:
				placement := PlacementPolicy{Name: PlacementNames()[rand.IntN(2)], Threshold: 2, Penalty: 2}
				if err := m.cache.SetPlacement(placement); err != nil {
					t.Error(err)
				}
			default:
				rule := policy.Names()[rand.IntN(len(policy.Names()))]
				if rand.IntN(2) == 0 {
					rule = "lfu"
				}
				if err := m.cache.SetEviction(rule); err != nil {
					t.Error(err)
				}
			}
		}
	})
	all.Wait()
	for _, d := range m.cache.Status().Devices {
		require.Zero(t, d.Brackets+d.BracketsWaiting)
	}
	for _, d := range m.cache.devices {
		require.Empty(t, d.kept.by)
	}
}
