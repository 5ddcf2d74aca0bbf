package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// secondTarget is the longest time in ms that a process may take to map what the GPU already has.
const secondTarget = 50

// zeros makes a data file without data.
func (s *session) zeros(name string, n int64) (*dataFile, error) {
	f, err := os.Create(s.mount.home(name))
	if err != nil {
		return nil, err
	}
	s.later(func() { _ = os.Remove(s.mount.home(name)) })
	d := &dataFile{name: name, size: n, sums: make([][sha256.Size]byte, pieces(n))}
	whole := sha256.Sum256(make([]byte, min(n, pieceSize)))
	for i := range d.sums {
		d.sums[i] = whole
		if _, size := piece(i, n); size != min(n, pieceSize) {
			d.sums[i] = sha256.Sum256(make([]byte, size))
		}
	}
	return d, errors.Join(f.Truncate(n), f.Close())
}

// mapIn makes a worker map a file and check the bytes. It returns how long the mapping took.
func mapIn(c *child, path string, d *dataFile) (time.Duration, error) {
	a, err := c.do(order{Do: "map", Path: path, Size: d.size})
	if err != nil {
		return 0, err
	}
	looked, err := c.do(order{Do: "check", Pieces: d.looked()})
	if err != nil {
		return 0, err
	}
	return a.Took, d.same(looked.Sums)
}

// secondRows map files that the GPU already has, in other processes.
func secondRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	status, err := s.mount.status()
	if err != nil {
		return nil, err
	}
	g := s.gpus[0]
	var list []rows.Row
	sizes := []int64{64 << 20, 1 << 30, s.size, 40 << 30, s.large}
	slices.Sort(sizes)
	for _, n := range slices.Compact(sizes) {
		if n > s.large {
			break
		}
		if n > status.Devices[0].Memory {
			list = append(list, rows.Row{Group: "second", Name: "second process maps " + sizeText(n),
				Skip: fmt.Sprintf("%s has %s for gaiafs", g, sizeText(status.Devices[0].Memory))})
			continue
		}
		list = append(list, s.secondRow(ctx, g, n))
	}
	return append(list, s.manyRows(ctx, g, d)...), nil
}

// secondRow makes a new process map a file of n bytes without data, which the GPU already has.
func (s *session) secondRow(ctx context.Context, g gpu, n int64) rows.Row {
	name := fmt.Sprintf("zeros-%d", n)
	var d *dataFile
	var held *gaiafs.Mapping
	var first time.Duration
	drop := func() {
		if held != nil {
			_ = held.Close()
			_ = s.mount.forget(name, 0, n, g.device())
			held = nil
		}
	}
	s.later(drop)
	var worker *child
	return rows.Row{
		Group: "second", Name: "second process maps " + sizeText(n), Unit: rows.Milliseconds,
		Targets: []rows.Target{{Limit: secondTarget}},
		Sides: []rows.Side{{Name: "gaiafs",
			Prepare: func(context.Context) (err error) {
				if held == nil {
					s.endRow(drop)
					if d, err = s.zeros(name, n); err != nil {
						return err
					}
					start := time.Now()
					held, err = s.mount.mapFile(name, 0, n, gaiafs.ProtRead, g.device())
					first = time.Since(start)
					if errors.Is(err, syscall.ENOMEM) { // the budget suffices, but others took the memory
						return fmt.Errorf("%w: %w", rows.ErrSkip, err)
					}
				}
				if err == nil {
					worker, err = startWorker(ctx, s.options.gpus, g.device())
				}
				return err
			},
			Measure: func(context.Context) (float64, error) {
				defer worker.end()
				took, err := mapIn(worker, s.mount.path(name), d)
				return ms(took), err
			}}},
		Note: func() string { return fmt.Sprintf("the first one took %.1f ms", ms(first)) },
	}
}

// endRow calls f when the next row begins to prepare or the group ends, to free the memory of a file that fills the
// GPU.
func (s *session) endRow(f func()) {
	if s.before != nil {
		s.before()
	}
	s.before = f
}

// manyRows let several processes map the data file at once, and measure the memory that this takes.
func (s *session) manyRows(ctx context.Context, g gpu, d *dataFile) []rows.Row {
	var workers []*child
	var held *gaiafs.Mapping
	s.later(func() {
		for _, w := range workers {
			w.end()
		}
		if held != nil {
			_ = held.Close()
		}
	})
	// enough makes sure that there are n processes, none of which maps anything yet.
	enough := func(n int) error {
		if held == nil {
			s.endRow(func() {})
			var err error
			if held, err = s.mapped(d.name, d.size, gaiafs.ProtRead, g); err != nil {
				return err
			}
			if err := s.check.data(g, addressOf(held), d.size, d); err != nil {
				return err
			}
		}
		for len(workers) < n {
			w, err := startWorker(ctx, s.options.gpus, g.device())
			if err != nil {
				return err
			}
			workers = append(workers, w)
		}
		return nil
	}
	taken := make(map[int]int64) // the maximum, by the number of processes
	together := func(n int) (float64, error) {
		before, err := s.memoryInUse(g)
		if err != nil {
			return 0, err
		}
		times, errs := make([]time.Duration, n), make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { times[i], errs[i] = mapIn(workers[i], s.mount.path(d.name), d) })
		}
		wg.Wait()
		after, err := s.memoryInUse(g)
		taken[n] = max(taken[n], after-before)
		slowest := time.Duration(0)
		for i := range n {
			slowest = max(slowest, times[i])
			_, endErr := workers[i].do(order{Do: "unmap"})
			err = errors.Join(err, errs[i], endErr)
		}
		return ms(slowest), err
	}
	var list []rows.Row
	counts := []int{1, 2, 4, 8}
	for _, n := range counts {
		list = append(list, rows.Row{
			Group: "second", Name: fmt.Sprintf("%s, other processes at once: %d, the slowest of them", sizeText(d.size),
				n),
			Unit: rows.Milliseconds, Targets: []rows.Target{{Limit: secondTarget}},
			Sides: []rows.Side{{Name: "gaiafs",
				Prepare: func(context.Context) error { return enough(n) },
				Measure: func(context.Context) (float64, error) { return together(n) }}},
		})
	}
	return append(list, rows.Row{
		Group: "second", Name: "memory of the GPU that these mappings took", Unit: rows.Mebibytes, Rounds: 1,
		Targets: []rows.Target{{Limit: 0}},
		Sides: []rows.Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
			most := int64(0)
			for _, n := range taken {
				most = max(most, n)
			}
			return float64(most) / (1 << 20), nil
		}}},
		Note: func() string {
			var each []string
			for _, n := range counts {
				if most, ran := taken[n]; ran {
					each = append(each, fmt.Sprintf("%s with %d", sizeText(most), n))
				}
			}
			return "beyond the processes' own contexts; the most in any round: " + strings.Join(each, ", ")
		},
	})
}

// memoryInUse returns how much less free memory the GPU has; for an emulated device, how much gaiafs uses of it.
func (s *session) memoryInUse(g gpu) (int64, error) {
	if _, emulated := g.(hostGPU); emulated {
		status, err := s.mount.status()
		if err != nil {
			return 0, err
		}
		return status.Devices[0].Used, nil
	}
	free, err := g.freeMemory()
	return -free, err
}
