package prefetch

import (
	"math"

	"github.com/gaiafs/gaiafs/internal/choices"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// MinWindow is the first window of a stream that is known to be sequential, in pages (512 KiB).
	MinWindow = 512 << 10 >> page.Shift
	// MaxWindow is the largest window, in pages (16 MiB).
	MaxWindow = 16 << 20 >> page.Shift
)

// Pattern is what a program said about its accesses.
type Pattern uint8

const (
	// Unknown means that the predictor has to find out.
	Unknown Pattern = iota
	// Sequential opens a window with the first access.
	Sequential
	// Random reads nothing ahead.
	Random
)

// Predictor watches the accesses of one file. Calls must not overlap.
type Predictor interface {
	// Access says that a program accesses the pages of rg, which the caller fetches. It appends to ahead what else to
	// fetch: ranges within the file, most urgent first. They may overlap pages that are present.
	Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range
	// Unused says that pages of rg that were fetched ahead have been dropped, and that nobody accessed them.
	Unused(rg page.Range)
	// Resize says that the file ends before page end. Until it is called, the file has no end. Facts about pages past
	// end are forgotten.
	Resize(end page.Index)
}

// predictors are listed in the order in which people want to see them.
var predictors = choices.Table[func() Predictor]{
	{Name: "none", About: "fetches nothing ahead", Of: func() Predictor { return none{} }},
	{Name: "kernel", About: "Linux's read-ahead with windows of 128 KiB",
		Of: func() Predictor { return NewKernel(kernelWindow) }},
	{Name: "tree", About: "64 KiB blocks, and all of a part of 2 MiB if more than half of it is there",
		Of: func() Predictor { return NewTree() }},
	{Name: "streams", About: "sequential, strided and reverse streams, windows up to 4 MiB",
		Of: func() Predictor { return NewStreams(CPUStreams) }},
	{Name: "streams-16m", About: "the same with windows up to 16 MiB, for devices",
		Of: func() Predictor { return NewStreams(DeviceStreams) }},
	{Name: "coverage", About: "learns how much of the surroundings is used",
		Of: func() Predictor { return NewCoverage(DefaultCoverage) }},
	{Name: "device", About: "streams-16m and coverage together, for lazy mappings of devices",
		Of: func() Predictor { return NewDevice() }},
}

// Names returns the names of all predictors.
func Names() []string { return predictors.Names() }

// About says in one line what the named predictor does.
func About(name string) string { return predictors.About(name) }

// New makes the named predictor for one file.
func New(name string) (Predictor, error) {
	newOne, err := predictors.Find(name, "predictor %q")
	if err != nil {
		return nil, err
	}
	return newOne(), nil
}

// endless is the end of a file whose end is not known.
const endless = page.Index(math.MaxInt64 >> page.Shift)

// none fetches nothing ahead.
type none struct{}

func (none) Access(_ page.Range, _ Pattern, ahead []page.Range) []page.Range { return ahead }
func (none) Unused(page.Range)                                               {}
func (none) Resize(page.Index)                                               {}

// add appends the part of rg before end, and joins it with the last range if they are adjacent.
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
