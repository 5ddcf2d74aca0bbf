package bench

import (
	"context"
	"fmt"
	"os"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// Dimensions of the comparison.
var (
	fioPatterns = []string{"read", "randread", "write", "randwrite"}
	fioBlocks   = []int64{4 << 10, 128 << 10, 1 << 20, 4 << 20}
	fioJobs     = []int{1, 16}
	fioStates   = []state{cold, hostWarm, deviceCached}
)

// fioSize is the size of the files. It is a multiple of what the largest number of jobs needs for one block of the
// largest size.
const fioSize, fioSizeQuick = 128 << 20, 64 << 20

// fioWorkloads returns every combination, or with quick the most informative ones. Those that need a device come last,
// because the file is mapped from then on.
func fioWorkloads(quick bool) (all []fioWork) {
	if quick { // fio takes a third of a second to start and end, so there are few of these
		return []fioWork{
			{"read", 1 << 20, 1, hostWarm}, {"randread", 4 << 10, 1, hostWarm}, {"randread", 4 << 10, 16, hostWarm},
			{"write", 4 << 10, 1, hostWarm}, {"write", 1 << 20, 1, hostWarm}, {"randwrite", 4 << 10, 1, hostWarm},
			{"read", 1 << 20, 1, cold}, {"randread", 4 << 10, 1, cold},
			{"read", 1 << 20, 1, deviceCached}, {"randread", 4 << 10, 16, deviceCached},
		}
	}
	for _, st := range fioStates {
		for _, pattern := range fioPatterns {
			for _, block := range fioBlocks {
				for _, jobs := range fioJobs {
					all = append(all, fioWork{pattern, block, jobs, st})
				}
			}
		}
	}
	return all
}

// targets are the targets in docs/bench.md.
func (w *fioWork) targets() []rows.Target {
	list := []rows.Target{{Against: placeLoopback, Limit: 1}, {Against: placeLoopback1M, Limit: 1}}
	switch {
	case w.writes():
	case w.state == hostWarm:
		list = append(list, rows.Target{Against: placeBacking, Limit: 0.97})
	case w.state == cold && !w.random():
		list = append(list, rows.Target{Against: placeBacking, Limit: 0.95})
	case w.state == cold && w.block == 4<<10 && w.jobs == 1:
		list = append(list, rows.Target{Against: placeBacking, Limit: 0.85})
	}
	return list
}

func fioRows(_ context.Context, s *session) ([]rows.Row, error) {
	x, err := newFio(s)
	if err != nil {
		return nil, err
	}
	places, err := s.threePlaces()
	if err != nil {
		return nil, err
	}
	var large *place // the loopback with large requests
	all := places
	if !s.Quick {
		if large, err = s.place(placeLoopback1M); err != nil {
			return nil, err
		}
		all = append(all[:len(all):len(all)], large)
	}
	size := int64(fioSize)
	if s.Quick {
		size = fioSizeQuick
	}
	files := make(map[bool]*dataFile) // for reading and for writing
	for _, writes := range []bool{false, true} {
		if writes && s.given != nil {
			break
		}
		if files[writes], err = s.newFile(fmt.Sprintf("fio-%t.dat", writes), size, all...); err != nil {
			return nil, err
		}
	}
	devices := s.needDevices(places[0], 1)
	var list []rows.Row
	for _, w := range fioWorkloads(s.Quick) {
		d := files[w.writes()]
		if d == nil {
			continue // the user's file is never written to
		}
		r := rows.Row{Group: "fio", Name: w.String(), Labels: w.labels(), Unit: rows.MBPerSecond, Targets: w.targets()}
		switch {
		case w.state != hostWarm && s.cold != "":
			r.Skip = s.cold
		case w.state == deviceCached && devices != nil:
			r.Skip = devices.Error()
		case !w.fits(d):
			r.Skip = fmt.Sprintf("the file is too small for %d jobs", w.jobs)
		}
		for i, p := range places {
			if i == 2 && large != nil && w.block >= 1<<20 {
				r.Sides = append(r.Sides, x.side(large, d, w))
			}
			r.Sides = append(r.Sides, x.side(p, d, w))
		}
		list = append(list, r)
	}
	if s.given != nil {
		return list, nil
	}
	late, err := x.writeBackRows(places)
	if err != nil {
		return nil, err
	}
	list = append(list, late...)
	skip := ""
	if devices != nil {
		skip = devices.Error()
	}
	mapped, err := x.mappedRows(places, skip)
	return append(list, mapped...), err
}

// writeBackRows are about a mount for which the kernel caches writes and sends them later.
func (x *fio) writeBackRows(places []*place) ([]rows.Row, error) {
	s := x.session
	p, err := s.place(placeWriteBack)
	if err != nil {
		return nil, err
	}
	size := int64(fioSizeQuick)
	skip := ""
	if p.passes() {
		skip = "the files pass through (--gpus " + s.GPUs + "), so the kernel caches no writes for --write-back"
	}
	sides := append([]*place{p}, places[1:]...)
	d, err := s.newFile("fio-late.dat", size, sides...)
	if err != nil {
		return nil, err
	}
	var list []rows.Row
	for _, pattern := range []string{"write", "randwrite"} {
		for _, block := range []int64{4 << 10, 1 << 20} {
			w := fioWork{pattern, block, 1, hostWarm}
			if s.Quick && (w.random() || block > 4<<10) {
				continue
			}
			r := rows.Row{Group: "fio", Name: w.String() + ", --write-back", Labels: w.labels(), Unit: rows.MBPerSecond,
				Skip:    skip,
				Targets: []rows.Target{{Against: placeLoopback, Limit: 1}}}
			r.Labels["mount"] = "write-back"
			if !w.random() {
				r.Targets = append(r.Targets, rows.Target{Against: placeBacking, Limit: 0.7})
			}
			for _, side := range sides {
				r.Sides = append(r.Sides, x.side(side, d, w))
			}
			list = append(list, r)
		}
	}
	return list, nil
}

// mappedRows compare a file that a device maps for writing, so that every request consults the page cache. skip, if not
// empty, says why these rows cannot run.
func (x *fio) mappedRows(places []*place, skip string) ([]rows.Row, error) {
	s := x.session
	d, err := s.newFile("fio-mapped.dat", fioSizeQuick, places...)
	if err != nil {
		return nil, err
	}
	var mapping *gaiafs.Mapping
	s.later(func() {
		if mapping != nil {
			_ = mapping.Close()
		}
	})
	keep := func() error {
		if mapping != nil {
			return nil
		}
		f, err := os.OpenFile(places[0].path(d.name), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		mapping, err = gaiafs.Map(f, 0, d.size, readWrite, 0, gaiafs.Stays())
		return err
	}
	var list []rows.Row
	for _, pattern := range fioPatterns {
		for _, block := range []int64{4 << 10, 1 << 20} {
			if s.Quick && (pattern != "randwrite" || block > 4<<10) {
				continue
			}
			w := fioWork{pattern, block, 1, hostWarm}
			r := rows.Row{Group: "fio", Name: w.String() + ", mapped by a device", Labels: w.labels(),
				Unit: rows.MBPerSecond, Skip: skip}
			r.Labels["mapped"] = "writable"
			for i, p := range places {
				side := x.side(p, d, w)
				side.Check = nil // writing rows come in between, and the same workloads are checked above
				if warm := side.Prepare; i == 0 {
					side.Prepare = func(ctx context.Context) error {
						if err := keep(); err != nil {
							return err
						}
						return warm(ctx)
					}
				}
				r.Sides = append(r.Sides, side)
			}
			list = append(list, r)
		}
	}
	return list, nil
}
