package policy

import (
	"cmp"
	"iter"
	"time"

	"github.com/gaiafs/gaiafs/internal/choices"
)

// rule is a Rule made of an order.
type rule struct {
	book
	order func(x, y *facts) int
}

func (r *rule) Note(e Event) { r.note(e) }

func (r *rule) Victims() iter.Seq[ID] { return r.victims(r.order) }

// counter is a Counter made of an order.
type counter struct{ *rule }

func (c counter) Colder(than ID) iter.Seq[ID] {
	return func(yield func(ID) bool) {
		y := c.extents[than]
		for _, x := range c.present {
			if x.kept && c.order(x, y) < 0 && !yield(x.id) {
				return
			}
		}
	}
}

// ByBrackets names the rule that looks at open brackets.
const ByBrackets = "flexgpu"

// Counts reports whether the named rule uses access counts. Then it is a Counter.
func Counts(name string) bool { return name == byCounts || name == ByBrackets }

// byCounts names the rule that uses only access counts.
const byCounts = "lfu"

// rules are listed in the order in which people want to see them. Of makes the rule's order for a book.
var rules = choices.Table[func(b *book, o Options) func(x, y *facts) int]{
	{Name: "allocated", About: "the one that got its memory first, as in GAIA",
		Of: func(*book, Options) func(x, y *facts) int { return byAge }},
	{Name: "lru", About: "the one that has been unused for longest",
		Of: func(*book, Options) func(x, y *facts) int { return byUse }},
	{Name: byCounts,
		About: "the one with the fewest accesses per 2 MiB; among equals, the one that has been unused for longest",
		Of:    func(*book, Options) func(x, y *facts) int { return byCount }},
	{Name: ByBrackets,
		About: "first those that move in less time than the shortest open bracket usually takes; among these as lfu (FlexGPU)",
		Of:    flexGPU},
	{Name: "gpuswap", About: "one of the lowest priority, at random among equals",
		Of: func(b *book, o Options) func(x, y *facts) int {
			chance := atRandom(b, o)
			return func(x, y *facts) int { return cmp.Or(cmp.Compare(x.priority, y.priority), chance(x, y)) }
		}},
}

// Random returns a Rule that yields the extents in random order. It is a baseline for scores, and no rule of a mount.
func Random(seed uint64) Rule { return &byChance{newBook(), seed} }

// byChance is the Rule that Random returns.
type byChance struct {
	book
	seed uint64
}

func (r *byChance) Note(e Event) { r.note(e) }

// Victims draws one extent after the other. It is a shuffle that remembers only the positions that moved. The draw
// changes after each extent that left.
func (r *byChance) Victims() iter.Seq[ID] {
	return func(yield func(ID) bool) {
		base, n := mix(mix(r.seed)^r.left), len(r.present)
		moved := make(map[int]int)
		for i := range n {
			k := i + int(mix(base+uint64(i))%uint64(n-i))
			at := func(i int) int {
				if to, ok := moved[i]; ok {
					return to
				}
				return i
			}
			drawn := at(k)
			moved[k] = at(i)
			if x := r.present[drawn]; !x.mapped && !yield(x.id) {
				return
			}
		}
	}
}

// linkBandwidth is the bandwidth for moving an extent, in bytes a second: pinned copies of 2 MiB on an NVIDIA H200, 51
// GB/s.
const linkBandwidth = 51e9

// flexGPU is FlexGPU's order (Chen, 3.3.3). In the paper, a request waits if no extent moves in less time than the
// shortest running kernel. Here such extents come last, and the caller decides whether to wait.
func flexGPU(b *book, _ Options) func(x, y *facts) int {
	slow := func(x *facts) int {
		shortest, known := b.shortest()
		if known && time.Duration(float64(x.bytes)/linkBandwidth*float64(time.Second)) >= shortest {
			return 1
		}
		return 0
	}
	return func(x, y *facts) int { return cmp.Or(cmp.Compare(slow(x), slow(y)), byCount(x, y)) }
}

// atRandom returns a random order, which changes after each extent that left.
func atRandom(b *book, o Options) func(x, y *facts) int {
	draw := func(x *facts) uint64 { return mix(mix(mix(o.Seed)^b.left) ^ uint64(x.id)) }
	return func(x, y *facts) int { return cmp.Or(cmp.Compare(draw(x), draw(y)), cmp.Compare(x.id, y.id)) }
}

// mix is the finaliser of SplitMix64: each bit of the result depends on all bits of n.
func mix(n uint64) uint64 {
	n += 0x9e3779b97f4a7c15
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// Names returns the names of all rules.
func Names() []string { return rules.Names() }

// About says in one line which extent a rule evicts first.
func About(name string) string { return rules.About(name) }

// New makes the rule of the given name.
func New(name string, o Options) (Rule, error) {
	order, err := rules.Find(name, "rule %q for evictions")
	if err != nil {
		return nil, err
	}
	r := &rule{book: newBook()}
	r.order = order(&r.book, o)
	if o.ReadOnlyFirst {
		order := r.order
		r.order = func(x, y *facts) int { return cmp.Or(first(y.written, x.written), order(x, y)) }
	}
	if Counts(name) {
		return counter{r}, nil
	}
	return r, nil
}

func newBook() book {
	return book{extents: make(map[ID]*facts), brackets: brackets{make(map[Program]running),
		make(map[Program]time.Duration)}}
}

// first is negative if only x is true, and positive if only y is.
func first(x, y bool) int {
	switch {
	case x && !y:
		return -1
	case y && !x:
		return 1
	}
	return 0
}
