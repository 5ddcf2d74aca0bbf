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

// callSize is the largest range of the rows about acquire and release.
const callSize = 1 << 30

// window returns the part of n bytes that is compared after a round, another part each time.
func window(round int, n int64) (off, size int64) { return piece(round%pieces(n), n) }

// releaseRows measure the release of stores by a kernel into some of the pages.
func releaseRows(_ context.Context, s *session) ([]rows.Row, error) {
	g, n := s.gpus[0], s.call
	const name = "release"
	if err := s.paintedFile(name, n); err != nil {
		return nil, err
	}
	m, err := s.mapped(name, n, readWrite, g)
	if err != nil {
		return nil, err
	}
	f, err := s.opened(name)
	if err != nil {
		return nil, err
	}
	from, err := s.room(g, n)
	if err != nil {
		return nil, err
	}
	to, err := s.room(g, n)
	if err != nil {
		return nil, err
	}
	round := 0
	var list []rows.Row
	for _, percent := range []int64{0, 1, 50, 100} {
		var step, touched int64
		if percent > 0 {
			step = 100 / percent * pageSize
			touched = (n + step - 1) / step
		}
		var moved int64
		r := rows.Row{
			Group: "release", Name: fmt.Sprintf("mrelease of %s, %d %% of the pages modified", sizeText(n), percent),
			Unit: rows.Milliseconds,
			Sides: []rows.Side{
				{Name: "gaiafs",
					Prepare: func(context.Context) error {
						// What was released before goes home, and the device agrees with it.
						if err := m.Flush(0, n); err != nil || touched == 0 {
							return err
						}
						return g.touch(addressOf(m)+address(round%pageSize), step, touched, 1)
					},
					Measure: func(context.Context) (float64, error) {
						var took time.Duration
						counters, err := s.mount.counted(func() error {
							start := time.Now()
							pages, err := m.Release(0, n)
							took = time.Since(start)
							if err == nil && pages != touched {
								err = fmt.Errorf("%d pages were modified, and %d were released", touched, pages)
							}
							return err
						})
						if err != nil {
							return 0, err
						}
						moved += counters["collected_pages"] + counters["filled_pages"] + counters["refreshed_pages"] +
							counters["patched_pages"]
						off, size := window(round, n)
						round++
						return ms(took), s.check.same(g, addressOf(m)+address(off), f, off, size)
					}},
				{Name: "copy all of it to the host, pinned", Measure: func(context.Context) (float64, error) {
					start := time.Now()
					err := s.copyOutPinned(g, from, n)
					return ms(time.Since(start)), err
				}},
				{Name: "copy all of it within the GPU", Measure: func(context.Context) (float64, error) {
					start := time.Now()
					err := g.copyWithin(to, from, n)
					return ms(time.Since(start)), err
				}},
			},
			Note: func() string { return fmt.Sprintf("%d pages moved between device and host", moved) },
		}
		if percent == 0 {
			r.Targets = []rows.Target{{Limit: 2}}
		}
		list = append(list, r)
	}
	return list, nil
}

// acquireRows measure acquires after a CPU program has written some of the pages.
func acquireRows(_ context.Context, s *session) ([]rows.Row, error) {
	g, n := s.gpus[0], s.call
	const name = "acquire"
	if err := s.paintedFile(name, n); err != nil {
		return nil, err
	}
	f, err := s.opened(name)
	if err != nil {
		return nil, err
	}
	to, err := s.room(g, n)
	if err != nil {
		return nil, err
	}
	a := acquiring{s: s, g: g, n: n, f: f}
	comparisons := []rows.Side{
		{Name: "read + copy all of it, 8 readers",
			Prepare: func(context.Context) error { return warmUp(s.private(name), n) },
			Measure: func(context.Context) (float64, error) {
				start := time.Now()
				err := s.loadPinned(8, 2)(s.private(name), g, to, n)
				return ms(time.Since(start)), err
			}},
		{Name: "copy all of it, pinned", Measure: func(context.Context) (float64, error) {
			start := time.Now()
			err := s.copyPinned(g, to, n)
			return ms(time.Since(start)), err
		}},
	}
	var list []rows.Row
	for _, c := range []struct {
		name  string
		prot  gaiafs.Prot
		write func() error
	}{
		{"scattered", gaiafs.ProtRead, a.scattered}, {"contiguous", gaiafs.ProtRead, a.contiguous},
		{"scattered, mapped for writing", readWrite, a.scattered},
		{"contiguous, mapped for writing", readWrite, a.contiguous},
	} {
		var m *gaiafs.Mapping
		unmap := func() {
			if m != nil {
				_ = m.Close()
				m = nil
			}
		}
		s.later(unmap)
		r := rows.Row{
			Group: "acquire", Name: fmt.Sprintf("macquire of %s, 1 %% of the pages changed, %s", sizeText(n), c.name),
			Unit: rows.Milliseconds,
			Sides: append([]rows.Side{{Name: "gaiafs",
				Prepare: func(context.Context) (err error) {
					if m == nil {
						// Only this mapping exists, so it alone decides how pages are brought up to date.
						s.endRow(unmap)
						if m, err = s.mount.mapFile(name, 0, n, c.prot, g.device()); err != nil {
							return err
						}
					}
					if _, err := m.Acquire(0, n); err != nil {
						return err
					}
					return c.write()
				},
				Measure: func(context.Context) (float64, error) { return a.acquire(m) }}}, comparisons...),
		}
		for _, x := range comparisons {
			r.Targets = append(r.Targets, rows.Target{Against: x.Name, Limit: 10})
		}
		list = append(list, r)
	}
	return list, nil
}

// acquiring is a file that a CPU program changes and a device acquires.
type acquiring struct {
	s     *session
	g     gpu
	n     int64
	f     *os.File
	round int
}

// changed returns how many pages are changed each time.
func (a *acquiring) changed() int64 { return (a.n + 100*pageSize - 1) / (100 * pageSize) }

func (a *acquiring) scattered() error {
	for i := range a.changed() {
		if _, err := a.f.WriteAt([]byte{byte(a.round)}, i*100*pageSize+int64(a.round%pageSize)); err != nil {
			return err
		}
	}
	return nil
}

func (a *acquiring) contiguous() error {
	p := make([]byte, a.changed()*pageSize)
	stripes{size: a.n, width: a.n, writers: 1, seed: byte(a.round)}.store(0, p)
	_, err := a.f.WriteAt(p, 0)
	return err
}

func (a *acquiring) acquire(m *gaiafs.Mapping) (float64, error) {
	start := time.Now()
	pages, err := m.Acquire(0, a.n)
	took := time.Since(start)
	if err == nil && pages != a.changed() {
		err = fmt.Errorf("%d pages were changed, and %d were acquired", a.changed(), pages)
	}
	off, size := window(a.round, a.n)
	a.round++
	if err == nil && off > 0 { // contiguous changes pages at the start
		err = a.s.check.same(a.g, addressOf(m), a.f, 0, min(size, a.n))
	}
	return ms(took), errors.Join(err, a.s.check.same(a.g, addressOf(m)+address(off), a.f, off, size))
}

// copyOutPinned copies n bytes of a GPU to page-locked memory, two copies at a time.
func (s *session) copyOutPinned(g gpu, from address, n int64) error {
	free, err := s.pipelineMemory()
	if err != nil {
		return err
	}
	return parallel(int((n+pipelineChunk-1)/pipelineChunk), 2, func(i int) error {
		buf := <-free
		defer func() { free <- buf }()
		off := int64(i) * pipelineChunk
		return g.copyOut(buf[:min(pipelineChunk, n-off)], from+address(off))
	})
}

// copyPinned copies n bytes of arbitrary page-locked memory to a GPU, two copies at a time.
func (s *session) copyPinned(g gpu, to address, n int64) error {
	free, err := s.pipelineMemory()
	if err != nil {
		return err
	}
	return parallel(int((n+pipelineChunk-1)/pipelineChunk), 2, func(i int) error {
		buf := <-free
		defer func() { free <- buf }()
		off := int64(i) * pipelineChunk
		return g.copyIn(to+address(off), buf[:min(pipelineChunk, n-off)])
	})
}
