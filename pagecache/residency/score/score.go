package score

import (
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// Model is the cost of things. Bandwidths are in bytes a second.
type Model struct {
	// Local is device memory as kernels read it, Link the path of copies and remote accesses.
	Local, Link float64
	// Move is the time of a move, in addition to its bytes.
	Move time.Duration
}

// DefaultModel has the figures of an NVIDIA H200: kernels read its memory at more than 2,000 GB/s and pinned host
// memory at 51 GB/s, copies of 2 MiB run at 51 GB/s, and creating, mapping and unmapping 2 MiB takes 50 µs.
func DefaultModel() Model { return Model{2000e9, 51e9, 50 * time.Microsecond} }

// Placements are the ways to decide whether an extent moves in: at every access, by policy.Threshold, or never.
func Placements() []string { return []string{"always", "threshold", "never"} }

// Setup configures a play.
type Setup struct {
	// Memory is the memory of each device in bytes. There is always room for one extent.
	Memory int64
	// Placement is one of Placements.
	Placement string
	// Static and Penalty are those of policy.Threshold.
	Static, Penalty uint64
	Model           Model
}

// Check returns an error if the Setup is invalid.
func (s *Setup) Check() error {
	if !slices.Contains(Placements(), s.Placement) {
		return fmt.Errorf("there is no placement %q; there are %s", s.Placement, strings.Join(Placements(), ", "))
	}
	if s.Model.Local < 1 || s.Model.Link < 1 || s.Model.Move < 0 || s.Model.Move > time.Hour {
		return fmt.Errorf("bandwidths must be at least a byte a second, and a move at most an hour")
	}
	return nil
}

// Score is the result of a play. Sizes are in bytes.
type Score struct {
	// Accesses counts devices' accesses to extents, Hits those that found the extent in device memory.
	Accesses, Hits int64
	// Moves counts extents that moved in, Trips those of them that had been there before.
	Moves, Trips int64
	// Moved is what moved in, Home what changed extents copied home when they left, Remote what was accessed over the
	// link.
	Moved, Home, Remote int64
	Time                time.Duration
}

// Score replays the trace, with a rule of its own for each device.
func (s *Steps) Score(setup Setup, rule func() policy.Rule) (sum Score) {
	for _, steps := range s.devices {
		sum.add(s.play(steps, setup, rule()))
	}
	return sum
}

// Belady replays the trace with the rule that knows the future.
func (s *Steps) Belady(setup Setup) (sum Score) {
	for _, steps := range s.devices {
		sum.add(s.play(steps, setup, &belady{steps: steps, present: make(map[policy.ID]int32)}))
	}
	return sum
}

// random names the baseline that evicts any extent. It ignores policy.Options.ReadOnlyFirst.
const random = "random"

// Names returns the names of the rules that can be scored: those of mounts, and the baseline "random".
func Names() []string { return append(policy.Names(), random) }

// About says in one line which extent a rule evicts first.
func About(name string) string {
	if name == random {
		return "any one; a baseline, not a rule of mounts"
	}
	return policy.About(name)
}

// NewRule makes the rule of the given name, one of Names.
func NewRule(name string, o policy.Options) (policy.Rule, error) {
	if name == random {
		return policy.Random(o.Seed), nil
	}
	rule, err := policy.New(name, o)
	if err != nil {
		err = fmt.Errorf("%w, %s", err, random)
	}
	return rule, err
}

// BestOfChance replays the trace runs times with the random rule, and returns the Score with the least time.
func (s *Steps) BestOfChance(setup Setup, runs int) Score {
	scores := make([]Score, runs)
	var workers sync.WaitGroup
	seeds := make(chan int)
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := range seeds {
				scores[seed] = s.Score(setup, func() policy.Rule { return policy.Random(uint64(seed)) })
			}
		})
	}
	for seed := range runs {
		seeds <- seed
	}
	close(seeds)
	workers.Wait()
	return slices.MinFunc(scores, func(a, b Score) int { return int(a.Time - b.Time) })
}

func (s *Score) add(o Score) {
	s.Accesses, s.Hits, s.Moves, s.Trips = s.Accesses+o.Accesses, s.Hits+o.Hits, s.Moves+o.Moves, s.Trips+o.Trips
	s.Moved, s.Home, s.Remote = s.Moved+o.Moved, s.Home+o.Home, s.Remote+o.Remote
	s.Time += o.Time
}

// residence is the state of an extent in a play.
type residence struct{ here, changed, was bool }

// play replays the steps of one device.
func (s *Steps) play(steps []step, setup Setup, rule policy.Rule) (sum Score) {
	room := max(setup.Memory/s.extent, 1)
	used := int64(0)
	extents := make(map[policy.ID]*residence)
	threshold := policy.Threshold{Static: setup.Static, Penalty: setup.Penalty}
	local := int64(0)
	for i := range steps {
		st := &steps[i]
		if b, ok := rule.(*belady); ok {
			b.now = i
		}
		x := extents[st.id]
		if x == nil {
			x = new(residence)
			extents[st.id] = x
		}
		if st.cpu {
			if x.here {
				rule.Note(policy.Event{Kind: policy.Accessed, ID: st.id, Bytes: st.bytes})
			}
			continue
		}
		sum.Accesses++
		moves := setup.Placement != "never"
		if setup.Placement == "threshold" {
			moves = threshold.Access(st.id, st.write, used, room, used < room)
		}
		switch {
		case x.here:
			sum.Hits++
		case moves:
			for used == room {
				id := first(rule.Victims())
				rule.Note(policy.Event{Kind: policy.Left, ID: id})
				threshold.Left(id)
				y := extents[id]
				if y.changed {
					sum.Home += s.extent
				}
				*y = residence{was: true}
				used--
			}
			used++
			sum.Moves++
			sum.Moved += s.extent
			if x.was {
				sum.Trips++
			}
			x.here = true
			rule.Note(policy.Event{Kind: policy.Placed, ID: st.id, Bytes: s.extent})
		}
		if x.here {
			x.changed = x.changed || st.write
			local += st.bytes
		} else {
			sum.Remote += st.bytes
		}
		rule.Note(policy.Event{Kind: policy.Accessed, ID: st.id, Bytes: st.bytes, Write: st.write})
	}
	m := setup.Model
	seconds := float64(local)/m.Local + float64(sum.Moved+sum.Home+sum.Remote)/m.Link +
		float64(sum.Moves)*m.Move.Seconds()
	sum.Time = time.Duration(seconds * float64(time.Second))
	return sum
}

func first(ids iter.Seq[policy.ID]) policy.ID {
	for id := range ids {
		return id
	}
	panic("score: no extent may go")
}

// belady is the Rule that evicts the extent whose next access is last.
type belady struct {
	steps   []step
	now     int
	present map[policy.ID]int32 // the step of the next access
}

func (b *belady) Note(e policy.Event) {
	switch e.Kind {
	case policy.Placed, policy.Accessed:
		if _, here := b.present[e.ID]; here || e.Kind == policy.Placed {
			b.present[e.ID] = b.steps[b.now].next
		}
	case policy.Left:
		delete(b.present, e.ID)
	}
}

// Victims yields one extent; a play needs no more.
func (b *belady) Victims() iter.Seq[policy.ID] {
	return func(yield func(policy.ID) bool) {
		var victim policy.ID
		latest := int32(-1)
		for id, next := range b.present {
			if next > latest || next == latest && id < victim {
				victim, latest = id, next
			}
		}
		if latest >= 0 {
			yield(victim)
		}
	}
}
