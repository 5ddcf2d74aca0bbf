package main

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
)

// loader brings n bytes of a file into a GPU's memory in one of the ways that programs without gaiafs use.
type loader func(path string, g gpu, to address, n int64) error

// loadPageable reads into ordinary memory and copies from there, in turn.
func (s *session) loadPageable(path string, g gpu, to address, n int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if s.pageable == nil {
		if s.pageable, err = hostMemory(pieceSize); err != nil {
			return err
		}
	}
	for i := range pieces(n) {
		off, size := piece(i, n)
		if _, err := f.ReadAt(s.pageable[:size], off); err != nil {
			return err
		}
		if err := g.copyIn(to+address(off), s.pageable[:size]); err != nil {
			return err
		}
	}
	return nil
}

// pipelineChunk is how much a pipeline reads and copies at a time; pipelineBuffers is how many chunks are in flight.
const (
	pipelineChunk   = 16 << 20
	pipelineBuffers = 16
)

// loadPinned reads into page-locked memory with some threads, while others copy what has been read.
func (s *session) loadPinned(readers, copiers int) loader {
	return func(path string, g gpu, to address, n int64) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		free, err := s.pipelineMemory()
		if err != nil {
			return err
		}
		type chunk struct {
			buf []byte
			off int64
		}
		full := make(chan chunk, pipelineBuffers)
		errs := make([]error, readers+copiers)
		var next atomic.Int64
		var reading, copying sync.WaitGroup
		for r := range readers {
			reading.Go(func() {
				take := func() int64 { return next.Add(pipelineChunk) - pipelineChunk }
				for off := take(); off < n; off = take() {
					c := chunk{(<-free)[:min(pipelineChunk, n-off)], off}
					if _, errs[r] = f.ReadAt(c.buf, off); errs[r] != nil {
						free <- c.buf[:pipelineChunk]
						return
					}
					full <- c
				}
			})
		}
		for k := readers; k < len(errs); k++ {
			copying.Go(func() {
				for c := range full {
					if errs[k] == nil {
						errs[k] = g.copyIn(to+address(c.off), c.buf)
					}
					free <- c.buf[:pipelineChunk]
				}
			})
		}
		reading.Wait()
		close(full)
		copying.Wait()
		return errors.Join(errs...)
	}
}

// pipelineMemory returns the page-locked buffers of pipelines. One pipeline uses them at a time.
func (s *session) pipelineMemory() (chan []byte, error) {
	if s.pipeline != nil {
		return s.pipeline, nil
	}
	all, err := s.gpus[0].pinned(pipelineBuffers * pipelineChunk)
	if err != nil {
		return nil, err
	}
	s.pipeline = make(chan []byte, pipelineBuffers)
	for i := range pipelineBuffers {
		s.pipeline <- all[i*pipelineChunk:][:pipelineChunk:pipelineChunk]
	}
	return s.pipeline, nil
}
