package schedule

import (
	"cmp"
	"slices"
)

const (
	// MostPiece is the largest piece of disciplines that cut transfers. A GPU pauses for 2 to 5 µs after each copy: in
	// pieces of 2 MiB a link of 55 GB/s moves 47 to 50, in pieces of 4 MiB 51 to 52.
	MostPiece = 4 << 20
	// InFlight is the most bytes in flight of disciplines that bound them, except for a single larger request. With
	// less, the link is often idle until the next call begins. With four pieces it moves a hundredth more than with
	// three, and urgent requests take a tenth longer.
	InFlight = 3 * MostPiece
	// mostPassed is how many bytes may overtake a request: 5 ms of a link of 51 GB/s.
	mostPassed = 256 << 20
)

// window counts what is in flight, and how far requests were overtaken. A class and the more urgent ones together have
// at most InFlight and MostCalls when a request of that class begins. So all classes together never have more than six
// times as much.
type window struct {
	classes [len(classNames)]inFlight // by the class of a call's first request
	begun   int64                     // bytes that have begun so far
}

// inFlight is calls in progress, and their bytes.
type inFlight struct {
	calls int
	bytes int64
}

// waiting is a waiting request, with window.begun at its arrival.
type waiting struct {
	Request
	since int64
}

// fits reports whether a request may begin. Less urgent calls in progress do not count: the device carries out calls in
// the order in which they begin, so waiting for their end would gain nothing, and the device could become idle. The
// number of calls is bounded, too, because a more urgent request waits for those that began before it, however small.
func (w *window) fits(r Request) bool {
	var all inFlight
	for _, c := range w.classes[:r.Class+1] {
		all.calls, all.bytes = all.calls+c.calls, all.bytes+c.bytes
	}
	return all.calls < MostCalls && (all.bytes == 0 || all.bytes+r.Size <= InFlight)
}

// starves reports whether x was overtaken by too much.
func (w *window) starves(x waiting) bool { return w.begun-x.since > mostPassed }

func (w *window) begin(call []Request) {
	c := &w.classes[call[0].Class]
	for _, r := range call {
		c.bytes += r.Size
		w.begun += r.Size
	}
	c.calls++
}

func (w *window) end(call []Request) {
	c := &w.classes[call[0].Class]
	for _, r := range call {
		c.bytes -= r.Size
	}
	c.calls--
}

// above reports whether a call of a more urgent class is in progress.
func (w *window) above(c Class) bool {
	return slices.ContainsFunc(w.classes[:c], func(c inFlight) bool { return c.calls > 0 })
}

// place is the ID that decides where a request is in line.
func (x waiting) place() ID { return cmp.Or(x.After, x.ID) }

// line has waiting requests by class, and then by arrival of their transfers.
type line []waiting

func (l *line) add(x waiting) {
	at, _ := slices.BinarySearchFunc(*l, x, func(a, b waiting) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.place(), b.place()), cmp.Compare(a.ID, b.ID))
	})
	*l = slices.Insert(*l, at, x)
}

// remove takes a request out of the line.
func (l *line) remove(id ID) (waiting, bool) {
	i := slices.IndexFunc(*l, func(x waiting) bool { return x.ID == id })
	if i < 0 {
		return waiting{}, false
	}
	x := (*l)[i]
	*l = slices.Delete(*l, i, i+1)
	return x, true
}

// promote makes a request one that somebody waits for. It goes in order of arrival among these.
func (l *line) promote(id ID) {
	if x, ok := l.remove(id); ok {
		if x.Class > CPURead && !x.Own {
			x.Class = CPURead
		}
		l.add(x)
	}
}

// oldest returns the index of the request that arrived first.
func (l line) oldest() int {
	first := 0
	for i := range l {
		if l[i].ID < l[first].ID {
			first = i
		}
	}
	return first
}

// take takes the request at i, and those behind it that can share its call.
func (l *line) take(i int) (call []Request) {
	end, size := i, int64(0)
	for end < len(*l) {
		x := (*l)[end]
		if end > i && (x.Own || x.Class != (*l)[i].Class || size+x.Size > CallBytes) {
			break
		}
		call, size = append(call, x.Request), size+x.Size
		if end++; x.Own {
			break
		}
	}
	*l = slices.Delete(*l, i, end)
	return call
}
