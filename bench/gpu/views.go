package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const (
	// tensorSize is the size of a view's tensors, and tensorAt where they begin: at any address, as in safetensors
	// files.
	tensorSize = 40<<20 + 24
	tensorAt   = 140
	// rowSize is how much one of four ranks has of each row of a matrix: 4 KiB.
	rowSize   = 4 << 10
	rankCount = 4
	// checkedPart is the size of the parts of long segments that are compared with the file.
	checkedPart = 64 << 20
)

// tensors returns segments with about n bytes of a file, from byte tensorAt+shift on.
func tensors(n, shift int64) (list []gaiafs.Segment, size int64) {
	for at := int64(tensorAt) + shift; at+tensorSize <= n; at += tensorSize {
		list = append(list, gaiafs.Segment{Offset: at, Length: tensorSize})
		size += tensorSize
	}
	return list, size
}

// rank returns the segment that rank r of rankCount has of a matrix that fills n bytes of a file.
func rank(r int, n int64) gaiafs.Segment {
	const stride = rankCount * rowSize
	return gaiafs.Segment{Offset: tensorAt + int64(r)*rowSize, Length: rowSize, Stride: stride,
		Count: (n - tensorAt) / stride}
}

// viewer makes views of the data file that did not exist before, so that each is filled anew.
type viewer struct {
	s     *session
	d     *dataFile
	n     int64
	round int64
}

// ready brings the whole file into the host's page cache, and evicts it from all GPUs: views would copy mapped pages
// from there.
func (v *viewer) ready() error {
	err := warmUp(v.s.mount.home(v.d.name), v.n)
	for _, g := range v.s.gpus {
		err = errors.Join(err, v.s.mount.forget(v.d.name, 0, v.d.size, g.device()))
	}
	return err
}

// mapView makes a view and checks the first, the middle and the last segment, of which long ones in three parts.
func (v *viewer) mapView(g gpu, segments []gaiafs.Segment, check bool) (m *gaiafs.View, took time.Duration, err error) {
	f, err := v.s.mount.open(v.d.name)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	start := time.Now()
	if m, err = gaiafs.MapView([]*os.File{f}, segments, g.device()); err != nil {
		return nil, 0, err
	}
	took = time.Since(start)
	if !check {
		return m, took, nil
	}
	for _, i := range slices.Compact([]int{0, len(segments) / 2, len(segments) - 1}) {
		x := segments[i]
		for _, row := range slices.Compact([]int64{0, max(x.Count, 1) / 2, max(x.Count, 1) - 1}) {
			part := min(x.Length, checkedPart)
			for _, off := range slices.Compact([]int64{0, (x.Length - part) / 2, x.Length - part}) {
				at := addressOf(m.Mapping) + address(m.Offset(i)+row*x.Length+off)
				err = errors.Join(err, v.s.check.same(g, at, f, x.Offset+row*x.Stride+off, part))
			}
		}
	}
	return m, took, err
}

// whole makes the side that has all tensors in a view on the first of gpus, or on all at once. The rate counts the
// bytes that arrive on all of them.
func (v *viewer) whole(name string, gpus []gpu) rows.Side {
	return rows.Side{
		Name:    name,
		Prepare: func(context.Context) error { return v.ready() },
		Measure: func(context.Context) (float64, error) {
			v.round++
			segments, size := tensors(v.n, 8*v.round)
			took, err := v.atOnce(gpus, func(int) []gaiafs.Segment { return segments })
			return gigabytes(size*int64(len(gpus)), took), err
		},
	}
}

// atOnce makes a view on each of gpus at once, and closes them.
func (v *viewer) atOnce(gpus []gpu, segments func(i int) []gaiafs.Segment) (took time.Duration, err error) {
	views := make([]*gaiafs.View, len(gpus))
	errs := make([]error, len(gpus))
	var group sync.WaitGroup
	start := time.Now()
	for i, g := range gpus {
		group.Go(func() { views[i], _, errs[i] = v.mapView(g, segments(i), false) })
	}
	group.Wait()
	took = time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	for i, g := range gpus { // a shared view would take no time
		again, _, err := v.mapView(g, segments(i), true)
		errs = append(errs, err)
		if again != nil {
			errs = append(errs, again.Close())
		}
		errs = append(errs, views[i].Close())
	}
	return took, errors.Join(errs...)
}

// viewRows fill views of a file that is in the host's page cache.
func viewRows(_ context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	v := &viewer{s: s, d: d, n: min(d.size, s.size)}
	g := s.gpus[0]
	crossed := []float64{} // how often a byte of the views on all GPUs came from the host, in each round
	mapping := s.gaiafsLoad(d, v.n, func() error { return warmUp(s.mount.home(d.name), v.n) })
	mapping.Name = "gaiafs, a mapping"
	list := []rows.Row{{
		Group: "views", Name: sizeText(v.n) + " in aligned tensors", Unit: rows.GBPerSecond,
		Targets: []rows.Target{{Against: mapping.Name, Limit: 1}},
		Sides:   []rows.Side{v.whole("gaiafs, a view", s.gpus[:1]), mapping},
	}, {
		Group: "views", Name: fmt.Sprintf("rows of %s of one rank of %d", sizeText(rowSize), rankCount),
		Unit: rows.GBPerSecond,
		Sides: []rows.Side{{
			Name:    "gaiafs, a view",
			Prepare: func(context.Context) error { return v.ready() },
			Measure: func(context.Context) (float64, error) {
				v.round++
				x := rank(int(v.round)%rankCount, v.n-8*v.round)
				x.Offset += 8 * v.round
				took, err := v.atOnce(s.gpus[:1], func(int) []gaiafs.Segment { return []gaiafs.Segment{x} })
				return gigabytes(x.Length*x.Count, took), err
			},
		}, mapping},
	}, v.secondRow(g)}
	if len(s.gpus) > 1 {
		all := fmt.Sprintf("on %d GPUs at once, in sum", len(s.gpus))
		side := v.whole("gaiafs, views", s.gpus)
		views := side.Measure
		side.Measure = func(ctx context.Context) (float64, error) {
			before, err := s.mount.fromHost()
			if err != nil {
				return 0, err
			}
			speed, err := views(ctx)
			if err != nil {
				return 0, err
			}
			after, err := s.mount.fromHost()
			_, size := tensors(v.n, 8*v.round)
			crossed = append(crossed, float64(after-before)/float64(size))
			return speed, err
		}
		list = append(list, rows.Row{
			Group: "views", Name: "the same " + all, Unit: rows.GBPerSecond,
			Sides: []rows.Side{side, v.whole("gaiafs, a view on one", s.gpus[:1])},
			Note: func() string {
				return fmt.Sprintf("in the rounds, a byte came from the host %.3g times", crossed)
			},
		})
	}
	return list, nil
}

// secondRow maps a view that the GPU already has.
func (v *viewer) secondRow(g gpu) rows.Row {
	segments, _ := tensors(v.n, 0)
	var held *gaiafs.View
	v.s.later(func() {
		if held != nil {
			_ = held.Close()
		}
	})
	return rows.Row{
		Group: "views", Name: "the same again, which the GPU has", Unit: rows.Milliseconds,
		Targets: []rows.Target{{Limit: secondTarget}},
		Sides: []rows.Side{{
			Name: "gaiafs, a view",
			Prepare: func(context.Context) (err error) {
				if held == nil {
					held, _, err = v.mapView(g, segments, false)
				}
				return err
			},
			Measure: func(context.Context) (float64, error) {
				m, took, err := v.mapView(g, segments, true)
				if m != nil {
					err = errors.Join(err, m.Close())
				}
				return ms(took), err
			},
		}},
	}
}
