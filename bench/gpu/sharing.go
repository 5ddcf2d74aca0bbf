package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// writer is one of several programs that store into a file at once: a CPU program, or one on a GPU.
type writer struct {
	gpu gpu // nil: a CPU program
	// cpu or device is its window on the file.
	cpu    []byte
	device *gaiafs.Mapping
	// ownCPU or own is its private memory.
	ownCPU []byte
	own    address
}

// shared is a file into which each writer stores its own stripes.
type shared struct {
	s           *session
	name        string
	size, width int64
	gpus        []gpu // of the writers; nil means a CPU program
	fresh       bool  // both files are new in each round, and so without data

	writers       []*writer // set when they exist
	file, private *os.File
	read          []byte
	seed          byte
	result        *int64 // counts wrong bytes
}

// until says when a round of shared ends.
type until int

const (
	visible until = iota // every reader would see all stores
	readBack
	durable
)

func (u until) String() string {
	return [...]string{"until everyone sees it", "until it was read", "until it is on the disk"}[u]
}

// mergeChunk is how much hand-written merging reads, merges and writes at a time.
const mergeChunk = 4 << 20

// open makes the files, the windows and the private memory on first use.
func (x *shared) open() error {
	if x.writers != nil {
		return nil
	}
	if err := x.s.paintedFile(x.name, x.size); err != nil {
		return err
	}
	var err error
	if x.file, err = x.s.opened(x.name); err != nil {
		return err
	}
	if x.private, err = os.OpenFile(x.s.private(x.name), os.O_RDWR, 0); err != nil {
		return err
	}
	x.s.later(func() { _ = x.private.Close() })
	x.read = make([]byte, x.size)
	for _, g := range x.gpus {
		w := &writer{gpu: g}
		if g == nil {
			if w.cpu, err = unix.Mmap(int(x.file.Fd()), 0, int(x.size), unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_SHARED); err != nil {
				return err
			}
			x.s.later(func() { _ = unix.Munmap(w.cpu) })
			if w.ownCPU, err = hostMemory(x.size); err != nil {
				return err
			}
			x.s.later(func() { _ = unix.Munmap(w.ownCPU) })
		} else {
			if w.device, err = x.s.mapped(x.name, x.size, readWrite, g); err != nil {
				return err
			}
			if w.own, err = x.s.room(g, x.size); err != nil {
				return err
			}
		}
		x.writers = append(x.writers, w)
	}
	return nil
}

// stripes returns the stripes of writer i.
func (x *shared) stripes(i int) stripes {
	return stripes{size: x.size, width: x.width, first: int64(i), writers: int64(len(x.gpus)), seed: x.seed}
}

// all calls f for all writers at once.
func (x *shared) all(f func(i int, w *writer) error) error {
	errs := make([]error, len(x.writers))
	var wg sync.WaitGroup
	for i, w := range x.writers {
		wg.Go(func() { errs[i] = f(i, w) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// chunks calls f for ranges of the file, several at once.
func (x *shared) chunks(f func(off, n int64) error) error {
	return parallel(int((x.size+mergeChunk-1)/mergeChunk), 0, func(i int) error {
		off := int64(i) * mergeChunk
		return f(off, min(mergeChunk, x.size-off))
	})
}

// storeCPU stores stripes into host memory, on several threads.
func (x *shared) storeCPU(st stripes, p []byte, passes int) error {
	return x.chunks(func(off, n int64) error {
		for i := range passes {
			st.pass(i, passes).store(off, p[off:off+n])
		}
		return nil
	})
}

// prepare brings home what the last round left, or discards it. It brings devices up to date, and chooses what to store
// next.
func (x *shared) prepare(context.Context) error {
	if err := x.open(); err != nil {
		return err
	}
	x.seed++
	if x.fresh {
		for _, f := range []*os.File{x.file, x.private} {
			if err := errors.Join(f.Truncate(0), f.Truncate(x.size)); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(x.file.Sync(), x.private.Sync()); err != nil {
		return err
	}
	return x.all(func(_ int, w *writer) error {
		if w.gpu == nil {
			return nil
		}
		_, err := w.device.Acquire(0, x.size)
		return err
	})
}

// together makes all writers store into the file at once, in several passes. They release when all of them are done, at
// the point where apart merges. With early, each releases when it is done itself, while others may still be storing.
func (x *shared) together(end until, passes int, early bool) (float64, error) {
	start := time.Now()
	release := func(_ int, w *writer) (err error) {
		if w.gpu != nil {
			_, err = w.device.Release(0, x.size)
		}
		return err
	}
	err := x.all(func(i int, w *writer) error {
		if w.gpu == nil {
			return x.storeCPU(x.stripes(i), w.cpu, passes)
		}
		if err := w.gpu.paint(addressOf(w.device), x.stripes(i), passes); err != nil || !early {
			return err
		}
		return release(i, w)
	})
	if err == nil && !early {
		err = x.all(release)
	}
	if err == nil {
		err = x.finish(x.file, end)
	}
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	return ms(took), x.count(x.file)
}

// finish does to f what end asks for.
func (x *shared) finish(f *os.File, end until) error {
	switch end {
	case readBack:
		return x.chunks(func(off, n int64) error {
			_, err := f.ReadAt(x.read[off:off+n], off)
			return err
		})
	case durable:
		return f.Sync()
	}
	return nil
}

// count checks the whole file.
func (x *shared) count(f *os.File) error {
	n, err := wrongInFile(f, x.size, x.seed)
	*x.result += n
	return err
}

// apart makes each writer store into private memory, in several passes, merges that on the host and writes it to a
// file.
func (x *shared) apart(end until, passes int) (float64, error) {
	free, err := x.s.pipelineMemory()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	err = x.all(func(i int, w *writer) error {
		if w.gpu == nil {
			return x.storeCPU(x.stripes(i), w.ownCPU, passes)
		}
		return w.gpu.paint(w.own, x.stripes(i), passes)
	})
	if err != nil {
		return 0, err
	}
	err = x.chunks(func(off, n int64) error {
		buf := <-free
		defer func() { free <- buf }()
		merged, other := buf[:n], buf[mergeChunk:][:n]
		for i, w := range x.writers {
			to := merged
			if i > 0 {
				to = other
			}
			switch {
			case w.gpu != nil:
				if err := w.gpu.copyOut(to, w.own+address(off)); err != nil {
					return err
				}
			case i == 0:
				merged = w.ownCPU[off : off+n]
			default:
				to = w.ownCPU[off : off+n]
			}
			if i > 0 {
				x.stripes(i).each(off, to, func(part []byte, at int64) { copy(merged[at-off:], part) })
			}
		}
		_, err := x.private.WriteAt(merged, off)
		return err
	})
	if err == nil {
		err = x.finish(x.private, end)
	}
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	lost, err := wrongInFile(x.private, x.size, x.seed)
	if err == nil && lost > 0 {
		err = fmt.Errorf("merging by hand lost %d bytes", lost)
	}
	return ms(took), err
}

const sidePrivate = "private buffers"

// row measures one end, with programs that store in so many passes into what they share. early is that of together.
// target is the smallest ratio, 0 for none.
func (x *shared) row(group, name string, end until, passes int, early bool, target float64) rows.Row {
	if passes > 1 {
		name += fmt.Sprintf(", %d times over", passes)
	}
	if early {
		name += ", releases beside stores"
	}
	var targets []rows.Target
	if target > 0 {
		targets = []rows.Target{{Against: sidePrivate, Limit: target}}
	}
	return rows.Row{
		Group: group, Name: name + ", " + end.String(), Unit: rows.Milliseconds, Targets: targets,
		Sides: []rows.Side{
			{Name: "gaiafs", Prepare: x.prepare, Measure: func(context.Context) (float64,
				error) {
				return x.together(end, passes, early)
			}},
			{Name: sidePrivate, Prepare: x.prepare, Measure: func(context.Context) (float64,
				error) {
				return x.apart(end, passes)
			}},
		},
	}
}

// lostRow counts what the rows before it lost.
func lostRow(group string, lost *int64) rows.Row {
	return rows.Row{
		Group: group, Name: "lost updates", Unit: rows.Count, Rounds: 1, Targets: []rows.Target{{Limit: 0}},
		Sides: []rows.Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
			return float64(*lost),
				nil
		}}},
		Note: func() string { return "wrong bytes in all rounds of this group" },
	}
}

// Programs that share pages rarely store into each byte only once. The microbenchmark of the GAIA thesis (3.1, 6.2.2)
// makes them change what they share in a loop, and merges at the end. Emulated devices only serve to try the rows.
func (s *session) manyPasses(size int64) int {
	switch {
	case s.emulated:
		return 2
	case size == pageSize:
		return 10000
	}
	return 100
}

// sharingRows let two writers share pages.
func sharingRows(_ context.Context, s *session) ([]rows.Row, error) {
	lost := new(int64)
	var list []rows.Row
	pairs := []struct {
		name string
		gpus []gpu
	}{{"CPU and GPU", []gpu{nil, s.gpus[0]}}}
	if len(s.gpus) > 1 {
		pairs = append(pairs, struct {
			name string
			gpus []gpu
		}{"two GPUs", s.gpus[:2]})
	} else {
		list = append(list, rows.Row{Group: "sharing", Name: "two GPUs", Skip: "there is one"})
	}
	for k, pair := range pairs {
		for _, size := range []int64{pageSize, min(s.call, 64<<20)} {
			for _, width := range []int64{1, 8, 64, 4096} {
				if size <= width {
					continue // a single writer would have it all
				}
				x := &shared{s: s, name: fmt.Sprintf("shared-%d-%d-%d", k, size, width), size: size, width: width,
					gpus: pair.gpus, result: lost}
				name := fmt.Sprintf("%s, %s, strides of %d B", pair.name, sizeText(size), width)
				const target = 1 / 1.05
				list = append(list, x.row("sharing", name, visible, 1, false, target))
				many := s.manyPasses(size)
				if size > pageSize {
					list = append(list, x.row("sharing", name, readBack, 1, false, target))
				}
				list = append(list, x.row("sharing", name, visible, many, false, target))
				if width == 64 {
					list = append(list, x.row("sharing", name, visible, many, true, 0))
				}
			}
		}
	}
	return append(list, lostRow("sharing", lost)), nil
}

// stitchRows let two GPUs write one file whose tiles do not end on page boundaries.
func stitchRows(_ context.Context, s *session) ([]rows.Row, error) {
	if len(s.gpus) < 2 {
		return []rows.Row{{Group: "stitch", Name: "stitching on two GPUs", Skip: "there is one"}}, nil
	}
	lost := new(int64)
	const tile = 100_000
	x := &shared{s: s, name: "stitched", size: s.call, width: tile, gpus: s.gpus[:2], result: lost}
	name := fmt.Sprintf("stitching %s on two GPUs, tiles of %d B", sizeText(x.size), tile)
	y := *x
	y.name, y.fresh = "stitched-anew", true
	return []rows.Row{
		x.row("stitch", name, durable, 1, false, 1.3),
		y.row("stitch", name+", into a new file", durable, 1, false, 1.3),
		x.row("stitch", name, visible, 1, false, 1.3),
		lostRow("stitch", lost),
	}, nil
}
