package prefetch

import (
	"fmt"
	"math"
	"strings"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// MinWindow is the first window of a stream known to be sequential, in pages (512 KiB).
	MinWindow = 512 << 10 >> page.Shift
	// MaxWindow bounds the window, in pages (16 MiB).
	MaxWindow = 16 << 20 >> page.Shift
)

// Pattern is what the program said of its accesses.
type Pattern uint8

const (
	// Unknown leaves it to be found out.
	Unknown Pattern = iota
	// Sequential opens a window with the first access.
	Sequential
	// Random reads nothing ahead.
	Random
)

// Predictor watches the accesses of one file. Calls must not overlap.
type Predictor interface {
	// Access says that a program accesses the pages of rg, which the caller sees to, and appends what to fetch besides to
	// ahead: ranges within the file, the most urgent first. They may overlap what is there already.
	Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range
	// Unused says that pages of rg that were fetched ahead are there no more and nobody accessed them.
	Unused(rg page.Range)
	// Resize says that the file ends before page end. Until it is called, the file has no end. What was known of pages
	// past end is forgotten.
	Resize(end page.Index)
}

// predictors are in the order in which people want to see them.
var predictors = []struct {
	name, about string
	make        func() Predictor
}{
	{"none", "fetches nothing ahead", func() Predictor { return none{} }},
	{"kernel", "Linux's read-ahead with windows of 128 KiB", func() Predictor { return NewKernel(kernelWindow) }},
	{"tree", "64 KiB blocks, and all of a part of 2 MiB of which more than half is there", func() Predictor { return NewTree() }},
	{"streams", "sequential, strided and reverse streams, windows up to 4 MiB", func() Predictor { return NewStreams(CPUStreams) }},
	{"streams-16m", "the same with windows up to 16 MiB, for devices", func() Predictor { return NewStreams(DeviceStreams) }},
	{"coverage", "learns how much of the surroundings is used", func() Predictor { return NewCoverage(DefaultCoverage) }},
	{"device", "streams-16m and coverage together, for lazy mappings of devices", func() Predictor { return NewDevice() }},
}

// Names returns the names that New knows.
func Names() (names []string) {
	for _, p := range predictors {
		names = append(names, p.name)
	}
	return names
}

// About says in one line what the predictor of that name does.
func About(name string) string {
	for _, p := range predictors {
		if p.name == name {
			return p.about
		}
	}
	return ""
}

// New makes the predictor of that name for one file.
func New(name string) (Predictor, error) {
	for _, p := range predictors {
		if p.name == name {
			return p.make(), nil
		}
	}
	return nil, fmt.Errorf("there is no predictor %q; there are %s", name, strings.Join(Names(), ", "))
}

// endless is the end of a file of which nobody said where it ends.
const endless = page.Index(math.MaxInt64 >> page.Shift)

// none fetches nothing ahead.
type none struct{}

func (none) Access(_ page.Range, _ Pattern, ahead []page.Range) []page.Range { return ahead }
func (none) Unused(page.Range)                                               {}
func (none) Resize(page.Index)                                               {}

// add appends the part of rg that lies before end, joined with the last range where it continues that.
func add(ahead []page.Range, rg page.Range, end page.Index) []page.Range {
	rg = rg.Intersect(page.Range{End: end})
	if rg.Empty() {
		return ahead
	}
	if n := len(ahead); n > 0 && ahead[n-1].End == rg.Start {
		ahead[n-1].End = rg.End
		return ahead
	}
	return append(ahead, rg)
}
