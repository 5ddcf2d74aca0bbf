package bench

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const (
	// slowWrite is how much longer each write of at most 128 KiB takes on the slow disk.
	slowWrite = 5 * time.Millisecond
	// evictMemory is the memory of each device, and evictBudget the flag for it.
	evictMemory = 16 << 20
	evictBudget = "--gpu-memory=16MiB"
	// evictWindow is how much is mapped at once on the measured device, from a file several times as large as the
	// device's memory.
	evictWindow = 2 << 20
	evictFile   = 4 * evictMemory
	// evictLeast is the minimum number of windows to map.
	evictLeast = 20
)

// evicting has two devices. The second one is full of bytes that the slow disk does not have yet.
type evicting struct {
	p     *place
	files map[string]*os.File
	// held keeps the daemon from writing released bytes home while nothing else is mapped.
	held   *gaiafs.Mapping
	window int64 // offset of the next window
	value  byte
}

// evictRows measure whether one device waits for another one's evictions.
func evictRows(_ context.Context, s *session) ([]rows.Row, error) {
	p, err := s.placeWith(placeOnSlow, "emulated:2", evictBudget, "--write-back-interval=1h")
	if err != nil {
		return nil, err
	}
	x := &evicting{p: p, files: make(map[string]*os.File)}
	s.later(x.close)
	row := rows.Row{
		Group: "evict", Name: "gaia_mmap of 2 MiB while another device evicts to a slow disk", Unit: rows.Milliseconds,
		Sides: []rows.Side{
			{Name: "beside an eviction", Prepare: x.prepare, Measure: x.beside},
			{Name: "alone", Measure: func(context.Context) (float64, error) { return x.maps(nil) }},
		},
		// Two processors serve both devices, so a window takes longer; an eviction takes a hundred times as long.
		Targets: []rows.Target{{Against: "alone", Limit: 0.2}},
	}
	return []rows.Row{row}, nil
}

func (x *evicting) close() {
	if x.held != nil {
		_ = x.held.Close()
	}
	for name, f := range x.files {
		_ = f.Close()
		_ = os.Remove(x.p.path(name))
	}
}

// open makes the files.
func (x *evicting) open() error {
	if x.held != nil {
		return nil
	}
	for name, size := range map[string]int64{"windows": evictFile, "dirty": evictMemory, "next": evictMemory} {
		f, err := os.Create(x.p.path(name))
		if err != nil {
			return err
		}
		x.files[name] = f
		if err := f.Truncate(size); err != nil {
			return err
		}
	}
	var err error
	x.held, err = x.mapped("windows", 0, evictWindow, 0)
	return err
}

func (x *evicting) mapped(name string, off, n int64, device int) (*gaiafs.Mapping, error) {
	return gaiafs.Map(x.files[name], off, n, readWrite, device, gaiafs.Lazy(), gaiafs.Stays())
}

// prepare fills the second device with released bytes that are not home.
func (x *evicting) prepare(context.Context) error {
	if err := x.open(); err != nil {
		return err
	}
	m, err := x.mapped("dirty", 0, evictMemory, 1)
	if err != nil {
		return err
	}
	x.value++
	if _, err = m.WriteAt(slices.Repeat([]byte{x.value}, evictMemory), 0); err != nil {
		_ = m.Close()
		return err
	}
	return m.Close()
}

// beside makes the second device evict, and meanwhile maps windows on the first one.
func (x *evicting) beside(context.Context) (float64, error) {
	evicted := make(chan error, 1)
	go func() {
		m, err := x.mapped("next", 0, evictMemory, 1)
		if err == nil {
			err = m.Close()
		}
		evicted <- err
	}()
	value, err := x.maps(evicted)
	if err != nil {
		return 0, err
	}
	return value, <-evicted
}

// maps maps one window after another on the first device until the other one has evicted. It returns the median time in
// milliseconds.
func (x *evicting) maps(evicted chan error) (float64, error) {
	if err := x.open(); err != nil {
		return 0, err
	}
	var took []float64
	for len(evicted) == 0 && (evicted != nil || len(took) < evictLeast) {
		x.window = (x.window + evictWindow) % evictFile
		start := time.Now()
		m, err := x.mapped("windows", x.window, evictWindow, 0)
		if err != nil {
			return 0, err
		}
		took = append(took, ms(time.Since(start)))
		if err := m.Close(); err != nil {
			return 0, err
		}
	}
	if len(took) == 0 {
		return 0, rows.Impossible{Reason: "the disk is too fast: nothing was mapped while the device evicted"}
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}
