package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/gaiafs/gaiafs/internal/choices"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// The machine of the patterns: a GPU of 132 multiprocessors with 8 thread blocks each. In a step, a block reads 4 KiB
// (256 threads with 16 bytes each) and works for about a microsecond.
const (
	blocks   = 132 * 8
	step     = 4 << 10
	stepTime = time.Microsecond
	// soloTime is the time of a step if one block has a multiprocessor to itself.
	soloTime = 300 * time.Nanosecond
)

// patterns are listed in the order in which people want to see them.
var patterns = choices.Table[func(*maker)]{
	{Name: "sequential", About: "one thread block reads the file from start to end", Of: sequential},
	{Name: "strided", About: "132 x 8 thread blocks read it together, each every 1056th step", Of: stridedBlocks},
	{Name: "out-of-order", About: "one thread block for every 64 KiB, begun in random order among the next 1056",
		Of: outOfOrder},
	{Name: "random", About: "132 x 8 thread blocks read 4 KiB at random places, a sixteenth of the file in all",
		Of: random},
	{Name: "graph", About: "64 thread blocks visit vertices of a power-law graph and read their neighbours", Of: graph},
	{Name: "sparse", About: "132 x 8 thread blocks read a quarter of the records of 64 KiB, in random order",
		Of: sparse},
	{Name: "slices", About: "132 x 8 thread blocks each read a slice of the file from start to end", Of: slices},
	{Name: "shuffled", About: "one thread block for every 64 KiB, begun in entirely random order", Of: shuffled},
	{Name: "skewed", About: "132 x 8 thread blocks read 64 KiB at a time, four fifths of them from a fifth of its 80 parts", Of: skewed},
	{Name: "cyclic", About: "132 x 8 thread blocks read the whole file together, eight times over, 64 KiB at a time",
		Of: cyclic},
	{Name: "cpu", About: "eight threads: forward, backward and strided streams, and one that reads at random",
		Of: cpuStreams},
}

// Patterns returns the names of all patterns.
func Patterns() []string { return patterns.Names() }

// AboutPattern describes a pattern in one line.
func AboutPattern(name string) string { return patterns.About(name) }

// Make makes the trace of a pattern over a file of size bytes. The same seed makes the same trace.
func Make(pattern string, size int64, seed uint64) (*trace.Trace, error) {
	if size < blocks*step || size > 1<<36 {
		return nil, fmt.Errorf("a pattern needs a file of %d bytes to 64 GiB, not %d", blocks*step, size)
	}
	play, err := patterns.Find(pattern, "pattern %q")
	if err != nil {
		return nil, err
	}
	m := &maker{
		t:    &trace.Trace{Start: time.Unix(0, 0), Files: []trace.File{{Name: pattern, Size: size}}},
		rand: rand.New(rand.NewPCG(seed, 0)),
		size: size,
	}
	play(m)
	return m.t, nil
}

// maker makes a trace. Blocks make accesses in the order of their clocks, as if none ever waited for its bytes.
type maker struct {
	t      *trace.Trace
	rand   *rand.Rand
	size   int64
	clocks []time.Duration
}

// sources declares n thread blocks, which begin within some microseconds of each other.
func (m *maker) sources(device, n int) {
	for i := range n {
		m.t.Sources = append(m.t.Sources, trace.Source{Device: device, Thread: uint32(i)})
		m.clocks = append(m.clocks, time.Duration(m.rand.Int64N(int64(20*time.Microsecond))))
	}
}

// read makes an access by block b, which then works for about the time work.
func (m *maker) read(b int, off, n int64, work time.Duration) {
	m.t.Events = append(m.t.Events, trace.Event{Time: m.clocks[b], Source: uint32(b), Off: off,
		Len: min(n, m.size-off)})
	m.clocks[b] += time.Duration(float64(work) * (0.5 + m.rand.ExpFloat64()/2))
}

// earliest returns the block whose clock is the earliest.
func (m *maker) earliest() (b int) {
	for i, c := range m.clocks {
		if c < m.clocks[b] {
			b = i
		}
	}
	return b
}

func sequential(m *maker) {
	m.sources(0, 1)
	for off := int64(0); off < m.size; off += step {
		m.read(0, off, step, soloTime)
	}
}

func stridedBlocks(m *maker) {
	m.sources(0, blocks)
	for off := int64(0); off < m.size; off += step {
		m.read(int(off/step%blocks), off, step, stepTime)
	}
}

// record is the unit of work of a thread block in some patterns.
const record = 64 << 10

// scheduled runs one thread block per record, in the given order. As many as fit run at once.
func (m *maker) scheduled(order []int64) {
	m.sources(0, blocks)
	for _, r := range order {
		b := m.earliest()
		for off := r * record; off < min((r+1)*record, m.size); off += step {
			m.read(b, off, step, stepTime)
		}
	}
}

func (m *maker) records() []int64 {
	order := make([]int64, (m.size+record-1)/record)
	for i := range order {
		order[i] = int64(i)
	}
	return order
}

func outOfOrder(m *maker) {
	order := m.records()
	for i := range order {
		k := i + m.rand.IntN(min(blocks, len(order)-i))
		order[i], order[k] = order[k], order[i]
	}
	m.scheduled(order)
}

func shuffled(m *maker) {
	order := m.records()
	m.rand.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
	m.scheduled(order)
}

func sparse(m *maker) {
	order := m.records()
	m.rand.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
	m.scheduled(order[:len(order)/4])
}

func random(m *maker) {
	m.sources(0, blocks)
	for range m.size / step / 16 {
		m.read(m.rand.IntN(blocks), m.rand.Int64N(m.size/step)*step, step, stepTime)
	}
}

// skewed reads four times as much as the file has. The file has about 80 parts. A fifth of them, anywhere in the file,
// get four fifths of the accesses.
func skewed(m *maker) {
	m.sources(0, blocks)
	const hot, parts = 5, 80
	records := int64(len(m.records()))
	part := max(records/parts, 1)
	order := make([]int64, records/part)
	for i := range order {
		order[i] = int64(i) * part
	}
	m.rand.Shuffle(len(order), func(i, k int) { order[i], order[k] = order[k], order[i] })
	for range 4 * records {
		among := order[len(order)/hot:]
		if m.rand.IntN(hot) > 0 {
			among = order[:len(order)/hot]
		}
		m.read(m.rand.IntN(blocks), (among[m.rand.IntN(len(among))]+m.rand.Int64N(part))*record, record, stepTime)
	}
}

// cyclic reads all records in order, again and again, as kernels in a loop do.
func cyclic(m *maker) {
	m.sources(0, blocks)
	for range 8 {
		for _, r := range m.records() {
			m.read(int(r%blocks), r*record, record, stepTime)
		}
	}
}

// graph visits vertices in random order. The neighbours of a vertex are adjacent, 8 bytes each, and few vertices have
// most of them. An eighth of the file is the index: 16 bytes per vertex that locate its neighbours.
func graph(m *maker) {
	m.sources(0, 64)
	index := m.size / 8 / step * step
	type list struct{ off, n int64 }
	var lists []list
	for off := index; off < m.size; {
		n := int64(8 * 16 * math.Pow(1-m.rand.Float64(), -1/1.2)) // Pareto
		n = min(n, m.size-off, m.size/64)
		lists = append(lists, list{off, n})
		off += n
	}
	for range min(len(lists), int(m.size/step/8)) {
		b := m.rand.IntN(64)
		v := m.rand.IntN(len(lists))
		m.read(b, int64(float64(v)/float64(len(lists))*float64(index))/16*16, 16, stepTime)
		for off, end := lists[v].off, lists[v].off+lists[v].n; off < end; off += step {
			m.read(b, off, min(step, end-off), stepTime)
		}
	}
}

func slices(m *maker) {
	m.sources(0, blocks)
	slice := m.size / blocks / step * step
	for off := int64(0); off < slice; off += step {
		for b := range blocks {
			m.read(b, int64(b)*slice+off, step, stepTime)
		}
	}
}

// cpuStreams has threads that share a file, as the daemon sees them: the kernel asks for 128 KiB at a time.
func cpuStreams(m *maker) {
	const n = 128 << 10
	m.sources(trace.CPU, 8)
	part := m.size / 16 / n * n
	work := 300 * time.Microsecond
	for i := int64(0); i < part/n; i++ {
		for b := range 3 { // forward
			m.read(b, int64(b)*part+i*n, n, work)
		}
		for b := 3; b < 5; b++ { // backward
			m.read(b, int64(b+1)*part-(i+1)*n, n, work)
		}
		for b := 5; b < 7; b++ { // every fourth
			if i%4 == 0 {
				m.read(b, int64(b)*part+i*n, n, 4*work)
			}
		}
		if i%8 == 0 {
			m.read(7, 8*part+m.rand.Int64N(part*8/n)*n, n, 8*work)
		}
	}
}
