package model

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Flags of the tests that write traces.
var (
	TraceFolder   = flag.String("traces", "", "write traces of random programs into this folder, for spec/traces")
	TracePrograms = flag.Int("programs", 20, "number of random programs that write traces")
)

// Trace records an Oracle's events for a few bytes, as events of spec/Clients.tla. TLC then checks whether clients saw
// what they may see. The Oracle's own verdict is not part of it.
type Trace struct {
	layout Layout
	// bytes are the offsets of the watched bytes, stores the number of stores into each.
	bytes  []int64
	stores []int
	events []string
	// vague is set by an event without a counterpart in the specification. Nothing is recorded after it.
	vague bool
}

// NewTrace returns the trace of a program without an Oracle: the caller records the events. The watched bytes are zero
// at first.
func NewTrace(devices int, bytes ...int64) *Trace {
	return &Trace{layout: Layout{Devices: devices, CPUs: 1}, bytes: bytes, stores: make([]int, len(bytes))}
}

// Store records that an agent stored a byte. Agent 0 is the CPU, 1 the first device.
func (t *Trace) Store(agent int, off int64, b byte) {
	t.store(agent, off, 1, []values{{same: true, first: b}})
}

// Read records what an agent saw.
func (t *Trace) Read(agent int, off int64, got []byte) { t.read(agent, off, got) }

// Acquire records that a device acquired at least [off, off+n).
func (t *Trace) Acquire(agent int, off, n int64) { t.add("acquire", agent, t.within(off, n), 0) }

// Release records that a device released the pages of [off, off+n), and that the release returned before any other
// event.
func (t *Trace) Release(agent int, off, n int64) {
	t.add("publish", agent, t.touched(off, n), 0)
	t.add("finish", 0, t.touched(off, n), 0)
}

// Record makes the Oracle record events of the given bytes of the file.
func (o *Oracle) Record(bytes ...int64) *Trace {
	o.trace = &Trace{layout: o.layout, bytes: bytes, stores: make([]int, len(bytes))}
	return o.trace
}

// Spots returns, for a seed, two bytes of each of the first two pages that random programs often use.
func (l Layout) Spots(seed uint64) (bytes []int64) {
	n := uint64(len(spots))
	for p := range int64(min(2, l.Pages)) {
		a, b := seed%n, (seed/n+1+seed%n)%n
		bytes = append(bytes, p*PageSize+int64(spots[a]), p*PageSize+int64(spots[b]))
	}
	return bytes
}

// within returns the numbers of the watched bytes in [off, off+n).
func (t *Trace) within(off, n int64) (list []int) {
	if t == nil || t.vague {
		return nil
	}
	for w, at := range t.bytes {
		if off <= at && at < off+n {
			list = append(list, w)
		}
	}
	return list
}

// touched returns the numbers of the watched bytes whose pages [off, off+n) touches.
func (t *Trace) touched(off, n int64) (list []int) {
	if n <= 0 {
		return nil
	}
	first, end := off/PageSize*PageSize, (off+n+PageSize-1)/PageSize*PageSize
	return t.within(first, end-first)
}

// add records an event of an agent, or of a client's release, for some watched bytes.
func (t *Trace) add(event string, who int, bytes []int, value byte) {
	if t == nil || len(bytes) == 0 {
		return
	}
	names := make([]string, len(bytes))
	for i, w := range bytes {
		names[i] = fmt.Sprint(w + 1)
	}
	t.events = append(t.events, fmt.Sprintf(`[e |-> %q, a |-> %d, w |-> {%s}, v |-> %d]`, event, who,
		strings.Join(names, ", "), value))
}

func (t *Trace) store(agent int, off, n int64, vals []values) {
	for _, w := range t.within(off, n) {
		if len(vals) != 1 {
			t.vague = true
			return
		}
		t.stores[w]++
		t.add("store", agent, []int{w}, vals[0].at(t.bytes[w]))
	}
}

func (t *Trace) read(agent int, off int64, got []byte) {
	for _, w := range t.within(off, int64(len(got))) {
		t.add("read", agent, []int{w}, got[t.bytes[w]-off])
	}
}

// look records a byte of a view that was just acquired.
func (t *Trace) look(off int64, got byte) {
	t.add("look", 0, t.within(off, 1), got)
}

// Events returns the number of events recorded.
func (t *Trace) Events() int { return len(t.events) }

// batch is the number of traces that TLC checks at once. It follows them side by side, with all of them in memory.
const batch = 25

// SaveTraces writes traces of one layout into a folder: TLA+ modules for spec/Trace.tla, each in a folder of its own
// with at most batch traces.
func SaveTraces(folder string, traces []*Trace) error {
	for i := 0; len(traces) > 0; i++ {
		n := min(batch, len(traces))
		dir := filepath.Join(folder, fmt.Sprintf("%03d", i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "TraceData.tla"), module(traces[:n]), 0o644); err != nil {
			return err
		}
		traces = traces[n:]
	}
	return nil
}

// module returns the TLA+ module of some traces.
func module(traces []*Trace) []byte {
	var w bytes.Buffer
	most := 0
	l := traces[0].layout
	fmt.Fprintln(&w, "---- MODULE TraceData ----\nEXTENDS Naturals")
	fmt.Fprintf(&w, "Watched == 1..%d\nOwners == 1..%d\n", len(traces[0].bytes), l.Devices)
	fmt.Fprintf(&w, "Releasers == 0..%d\nTraces == <<\n", l.Clients()-1)
	for i, t := range traces {
		if i > 0 {
			w.WriteString(",\n")
		}
		most = max(most, slices.Max(t.stores))
		fmt.Fprintf(&w, "<<\n%s\n>>", strings.Join(t.events, ",\n"))
	}
	fmt.Fprintf(&w, ">>\nMost == %d\n====\n", most)
	return w.Bytes()
}
