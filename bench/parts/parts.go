// Package parts measures parts of gaiafs that a user cannot reach separately: the merge of one page, the search for
// modified pages on a device, and the memory of page states.
//
// It is the only part of bench that knows packages below the mount and the client library.
package parts

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// Merge is a page with a base and two changed versions. The versions change bytes that do not overlap.
type Merge struct {
	base, mine, theirs, out []byte
}

// NewMerge makes versions that each change the given share of the bytes, at random places.
func NewMerge(share float64) *Merge {
	rnd := rand.New(rand.NewPCG(1, 2))
	m := &Merge{base: random(rnd, page.Size), out: make([]byte, page.Size)}
	m.mine, m.theirs = bytes.Clone(m.base), bytes.Clone(m.base)
	for i := range m.base {
		switch x := rnd.Float64(); {
		case x < share:
			m.mine[i]++
		case x < 2*share:
			m.theirs[i]++
		}
	}
	return m
}

func random(rnd *rand.Rand, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(rnd.Uint32())
	}
	return p
}

// Run merges n times and returns the time of one merge.
func (m *Merge) Run(n int) time.Duration {
	start := time.Now()
	for range n {
		lrc.Merge3(m.out, m.base, m.mine, m.theirs)
	}
	return time.Since(start) / time.Duration(n)
}

// Copy copies the page n times and returns the time of one copy: a lower bound for a merge.
func (m *Merge) Copy(n int) time.Duration {
	start := time.Now()
	for range n {
		copy(m.out, m.mine)
	}
	return time.Since(start) / time.Duration(n)
}

// Search is device memory in which one page in a hundred is modified.
type Search struct {
	device   gpubackend.Device
	memory   gpubackend.Memory
	agreed   []gpubackend.Digest
	bytes    []byte // the host's copy of the device's memory after the modification
	pristine []byte // the same before the modification
	modified int64
}

// NewSearch makes n bytes of device memory, a multiple of 2 MiB. It uses three times as much host memory until Close.
func NewSearch(ctx context.Context, n int64) (*Search, error) {
	d, err := emulated.New(emulated.Options{Memory: n})
	if err != nil {
		return nil, err
	}
	s := &Search{device: d, agreed: make([]gpubackend.Digest, n/page.Size)}
	if s.memory, err = d.Alloc(n); err != nil {
		return nil, err
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	s.pristine = bytes.Repeat(random(rnd, 1<<20), int(n>>20))
	s.bytes = bytes.Clone(s.pristine)
	for p := int64(0); p < n/page.Size; p += 100 {
		s.bytes[p*page.Size+rnd.Int64N(page.Size)]++
		s.modified++
	}
	d.Key().SumPages(s.pristine, s.agreed)
	if err := d.CopyIn(ctx, []gpubackend.Copy{{Mem: s.memory, Host: s.bytes}}); err != nil {
		return nil, err
	}
	return s, nil
}

// Close frees the device.
func (s *Search) Close() error {
	if err := s.memory.Free(); err != nil {
		return err
	}
	return s.device.Close()
}

// Device makes the device find the modified pages and returns the time that this took.
func (s *Search) Device(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	found, err := s.device.Modified(ctx, []gpubackend.Scan{{Mem: s.memory, Agreed: s.agreed}})
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	var n int64
	for _, rg := range found[0] {
		n += rg.Len()
	}
	if n != s.modified {
		return 0, fmt.Errorf("the device found %d modified pages of %d", n, s.modified)
	}
	return took, nil
}

// Compare finds the modified pages by comparing with the copy, on as many goroutines as there are processors.
func (s *Search) Compare() (time.Duration, error) {
	start := time.Now()
	workers := runtime.GOMAXPROCS(0)
	counts := make([]int64, workers)
	pages := len(s.agreed)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for p := pages * w / workers; p < pages*(w+1)/workers; p++ {
				at := p * page.Size
				if !bytes.Equal(s.bytes[at:at+page.Size], s.pristine[at:at+page.Size]) {
					counts[w]++
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	var n int64
	for _, c := range counts {
		n += c
	}
	if n != s.modified {
		return 0, fmt.Errorf("comparing found %d modified pages of %d", n, s.modified)
	}
	return took, nil
}
