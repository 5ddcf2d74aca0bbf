package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// cachedPiece is the unit of placement: each piece of the file is on a device or not. The pieces on the device are
// spread over the whole file.
const cachedPiece = 2 << 20

// cachedOrder says which of four neighbouring pieces go to the device as its share grows by quarters.
var cachedOrder = [4]int64{0, 2, 1, 3}

// cachedPattern is a curve of figure 6.1.
type cachedPattern struct {
	name         string
	random, busy bool
	block        int64
}

var cachedPatterns = []cachedPattern{
	{"random", true, false, 4 << 10},
	{"sequential", false, false, 1 << 20},
	{"sequential, busy disk", false, true, 1 << 20},
}

// cachedRows measure CPU reads of a file that is partly on a device and otherwise only on the disk (thesis 6.2.1).
func cachedRows(_ context.Context, s *session) ([]rows.Row, error) {
	if s.cold != "" {
		return nil, rows.Impossible{Reason: s.cold}
	}
	places, err := s.placesNamed(placeGaiafs, placeBacking)
	if err != nil {
		return nil, err
	}
	if err := s.needDevices(places[0], 1); err != nil {
		return nil, err
	}
	size := int64(512 << 20)
	percents := []int{0, 25, 50, 75, 100}
	if s.Quick {
		size, percents = 64<<20, []int{0, 50, 100}
	}
	d, err := s.newFile("cached.dat", size, places...)
	if err != nil {
		return nil, err
	}
	if d.size < 4*cachedPiece {
		return nil, rows.Impossible{Reason: fmt.Sprintf("%s is too small to be partly on a device", d.name)}
	}
	cuda := !s.emulated(places[0])
	var list []rows.Row
	for _, percent := range percents { // the share on the device only grows
		for _, pattern := range cachedPatterns {
			for _, jobs := range []int{1, 16} {
				if s.Quick && jobs == 1 && pattern.busy {
					continue
				}
				list = append(list, s.cachedRow(d, places, pattern, jobs, percent, cuda))
			}
		}
	}
	threads := s.cachedRow(d, places, cachedPatterns[0], cachedThreads, 100, cuda)
	threads.Name, threads.Labels = fmt.Sprintf("random 4 KiB by %d threads, 100 %% on a device", cachedThreads), nil
	return append(list, threads), nil
}

// cachedThreads is the number of threads of one program that read through one descriptor, in the last row.
const cachedThreads = 8

func (s *session) cachedRow(d *dataFile, places []*place, pattern cachedPattern, jobs, percent int,
	cuda bool) rows.Row {
	name := fmt.Sprintf("%s %s %d job", pattern.name, blockText(pattern.block), jobs)
	if jobs > 1 {
		name += "s"
	}
	r := rows.Row{Group: "cached", Name: fmt.Sprintf("%s, %d %% on a device", name, percent), Unit: rows.MBPerSecond,
		Labels: map[string]string{"pattern": pattern.name, "block": strconv.FormatInt(pattern.block, 10),
			"jobs": strconv.Itoa(jobs), "percent": strconv.Itoa(percent)},
		Targets: []rows.Target{{Against: placeBacking, Limit: cachedTarget(pattern, jobs, percent, cuda)}}}
	a := &access{random: pattern.random, block: pattern.block, jobs: jobs, shared: jobs == cachedThreads,
		size: d.size, amount: d.size}
	if pattern.random {
		a.amount = 16 << 20
	}
	if a.size/int64(jobs) < a.block {
		r.Skip = fmt.Sprintf("the file is too small for %d jobs", jobs)
	}
	seed := uint64(percent) // both sides read the same pages, other rounds other pages
	for i, p := range places {
		round := seed
		checked := *a
		checked.verify = d.verify
		r.Sides = append(r.Sides, d.reading(rows.Side{Name: p.name,
			Prepare: func(context.Context) error {
				if i == 0 {
					if err := d.partOnDevice(p, percent); err != nil {
						return err
					}
				}
				return makeCold(p, d)
			},
			Measure: func(ctx context.Context) (float64, error) {
				round += 1000
				return s.readBeside(ctx, a, p, d, pattern.busy, round)
			}}, func(ctx context.Context) error {
			_, err := s.readBeside(ctx, &checked, p, d, pattern.busy, round)
			return err
		}))
	}
	return r
}

// cachedTarget is the required multiple of the disk's speed. The limits for GPU memory do not apply to emulated
// devices.
func cachedTarget(pattern cachedPattern, jobs, percent int, cuda bool) float64 {
	switch {
	case !cuda || percent < 100 || jobs < 16 && pattern.random:
		return 1
	case pattern.random:
		return 3
	}
	return 2
}

// readBeside reads the file and returns MB per second. With busy, other readers use the disk at the same time.
func (s *session) readBeside(ctx context.Context, a *access, p *place, d *dataFile, busy bool,
	seed uint64) (float64, error) {
	if busy {
		l, err := startLoad(ctx, p.home(d.name), d.size)
		if errors.Is(err, unix.EINVAL) {
			return 0, rows.Impossible{Reason: "the filesystem has no O_DIRECT to keep the disk busy with"}
		}
		if err != nil {
			return 0, err
		}
		defer l.close()
	}
	took, err := a.run(ctx, p.path(d.name), seed)
	return float64(a.bytes()) / 1e6 / took.Seconds(), err
}

// partOnDevice makes the device hold exactly this share of the file, in quarters.
func (d *dataFile) partOnDevice(p *place, percent int) error {
	if percent == 0 {
		return nil
	}
	m, err := d.mapped(p, 0, gaiafs.Lazy())
	if err != nil {
		return err
	}
	// Otherwise the parts in between would be read ahead.
	if err := m.Advise(0, m.Len(), gaiafs.AdviceRandom); err != nil {
		return err
	}
	var want int64
	for quarter, first := range cachedOrder {
		if percent < 25*(quarter+1) {
			break
		}
		for at := first * cachedPiece; at < d.size; at += 4 * cachedPiece {
			n := min(cachedPiece, d.size-at)
			if _, err := m.Acquire(at, n); err != nil {
				return err
			}
			want += n
		}
	}
	share, err := d.onDevice(p, 0)
	if err == nil && int64(share*float64(d.size)+0.5) != want {
		err = fmt.Errorf("%.1f %% of %s are on the device instead of %.1f", 100*share, d.name,
			100*float64(want)/float64(d.size))
	}
	return err
}
