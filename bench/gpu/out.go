package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const (
	// outSize is the most that is brought from a GPU to CPU programs.
	outSize = 4 << 30
	// outBlock is how much such a program reads at a time.
	outBlock = 4 << 20

	sideCopied = "pinned copy and write"
)

// outward is a file that a kernel overwrites completely.
type outward struct {
	s       *session
	n       int64
	file    *os.File
	private *os.File
	m       *gaiafs.Mapping
	own     address
	seed    byte
	buffers [][]byte
}

// outRows bring what a kernel stored to a CPU reader, and to the disk.
func outRows(_ context.Context, s *session) ([]rows.Row, error) {
	x := &outward{s: s, n: min(s.size, outSize) &^ (pageSize - 1)}
	const name = "out"
	if err := s.paintedFile(name, x.n); err != nil {
		return nil, err
	}
	var err error
	if x.file, err = s.opened(name); err != nil {
		return nil, err
	}
	if x.private, err = os.OpenFile(s.private(name), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	s.later(func() { _ = x.private.Close() })
	if x.m, err = s.mapped(name, x.n, readWrite, s.gpus[0]); err != nil {
		return nil, err
	}
	if x.own, err = s.room(s.gpus[0], x.n); err != nil {
		return nil, err
	}
	var list []rows.Row
	for _, readers := range []int{1, 8} {
		list = append(list, x.row(fmt.Sprintf("until a CPU program has read it, %d readers", readers), 1.3,
			func(f *os.File) error {
				return x.read(f, readers)
			}))
	}
	return append(list, x.row("until it is on the disk", 1.5, (*os.File).Sync)), nil
}

// row measures the time from the end of the kernel's stores until finish has returned.
func (x *outward) row(name string, target float64, finish func(f *os.File) error) rows.Row {
	paint := func(at address) error {
		x.seed++
		return x.s.gpus[0].paint(at, stripes{size: x.n, width: x.n, writers: 1, seed: x.seed}, 1)
	}
	return rows.Row{
		Group: "out", Name: fmt.Sprintf("%s from a GPU, %s", sizeText(x.n), name), Unit: rows.GBPerSecond,
		Targets: []rows.Target{{Against: sideCopied, Limit: target}},
		Sides: []rows.Side{{
			Name: "gaiafs",
			Prepare: func(context.Context) error {
				err := errors.Join(x.file.Sync(), forgetPages(x.s.mount.path("out")))
				if err == nil {
					_, err = x.m.Acquire(0, x.n)
				}
				return errors.Join(err, paint(addressOf(x.m)))
			},
			Measure: func(context.Context) (float64, error) {
				start := time.Now()
				_, err := x.m.Release(0, x.n)
				if err == nil {
					err = finish(x.file)
				}
				return x.done(start, x.file, err)
			},
		}, {
			Name:    sideCopied,
			Prepare: func(context.Context) error { return errors.Join(x.private.Sync(), paint(x.own)) },
			Measure: func(context.Context) (float64, error) {
				start := time.Now()
				err := x.write()
				if err == nil {
					err = finish(x.private)
				}
				return x.done(start, x.private, err)
			},
		}},
	}
}

// done returns the speed, or an error if the file differs from what the kernel stored.
func (x *outward) done(start time.Time, f *os.File, err error) (float64, error) {
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	n, err := wrongInFile(f, x.n, x.seed)
	if err == nil && n > 0 {
		err = fmt.Errorf("wrong bytes: %d of %s", n, f.Name())
	}
	return gigabytes(x.n, took), err
}

// write copies the private memory to pinned memory and writes that to the file, both at the same time.
func (x *outward) write() error {
	free, err := x.s.pipelineMemory()
	if err != nil {
		return err
	}
	return parallel(int((x.n+pipelineChunk-1)/pipelineChunk), 8, func(i int) error {
		buf := <-free
		defer func() { free <- buf }()
		off := int64(i) * pipelineChunk
		part := buf[:min(pipelineChunk, x.n-off)]
		if err := x.s.gpus[0].copyOut(part, x.own+address(off)); err != nil {
			return err
		}
		_, err := x.private.WriteAt(part, off)
		return err
	})
}

// read reads the whole file in order, with several readers at once.
func (x *outward) read(f *os.File, readers int) error {
	buffers := make(chan []byte, readers)
	for len(x.buffers) < readers {
		x.buffers = append(x.buffers, make([]byte, outBlock))
	}
	for _, b := range x.buffers[:readers] {
		buffers <- b
	}
	return parallel(int((x.n+outBlock-1)/outBlock), readers, func(i int) error {
		buf := <-buffers
		defer func() { buffers <- buf }()
		off := int64(i) * outBlock
		_, err := f.ReadAt(buf[:min(outBlock, x.n-off)], off)
		return err
	})
}
