package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// readTime is how long CPU programs read in one round of a row, at most. They stop earlier when they have read as many
// bytes as the file has.
const readTime = 2 * time.Second

// readPattern is how CPU programs read a file.
type readPattern struct {
	name   string
	size   int64
	random bool
	// direct reads past the kernel's cache of the mount, so that each read is a request.
	direct bool
	jobs   int
	// limit is how many times as fast as the disk reads from the GPU must be.
	limit float64
}

var readPatterns = []readPattern{
	{"random reads of 4 KiB by 16 jobs", 4 << 10, true, false, 16, 5},
	{"random reads of 4 KiB by 1 job", 4 << 10, true, false, 1, 1},
	{"random reads of 4 KiB by 16 jobs, O_DIRECT", 4 << 10, true, true, 16, 3},
	{"random reads of 4 KiB by 1 job, O_DIRECT", 4 << 10, true, true, 1, 1},
	{"random reads of 128 KiB by 4 jobs, O_DIRECT", 128 << 10, true, true, 4, 1},
	{"a sequential read", 1 << 20, false, false, 1, 2},
}

// readRows let CPU programs read a file of which the host's memory has nothing, and a GPU all, a part, or nothing.
func readRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	if err := s.mount.lockNothing(ctx, s.program); err != nil {
		return nil, err
	}
	n := min(d.size, s.call)
	const disk = "gaiafs, nothing on the GPU"
	var list []rows.Row
	for _, p := range readPatterns {
		for _, percent := range []int64{100, 50, 10} {
			held := (n*percent/100 + pageSize - 1) &^ (pageSize - 1)
			limit := 1.0
			if percent == 100 {
				limit = p.limit
			}
			var counters map[string]int64
			side := func(name string, held int64) rows.Side {
				return rows.Side{
					Name: name,
					Prepare: func(context.Context) error {
						err := s.mount.forget(d.name, 0, d.size, s.gpus[0].device())
						if err == nil && held > 0 {
							err = s.mount.keep(d.name, held, s.gpus[0].device())
						}
						return errors.Join(err, forgetPages(s.mount.path(d.name)), forgetPages(s.mount.home(d.name)))
					},
					Measure: func(context.Context) (speed float64, err error) {
						count, err := s.mount.counted(func() error {
							speed, err = p.read(s.mount.path(d.name), s.mount.home(d.name), n)
							return err
						})
						if held > 0 {
							counters = count
						}
						return speed, err
					},
				}
			}
			list = append(list, rows.Row{
				Group: "reads", Name: fmt.Sprintf("%s, %d %% on the GPU", p.name, percent), Unit: rows.GBPerSecond,
				Targets: []rows.Target{{Against: disk, Limit: limit}},
				Sides:   []rows.Side{side(fmt.Sprintf("gaiafs, %d %% on the GPU", percent), held), side(disk, 0)},
				Note: func() string {
					var text []string
					for _, name := range slices.Sorted(maps.Keys(counters)) {
						if strings.HasSuffix(name, "_bytes") || strings.HasSuffix(name, "_fallbacks") {
							text = append(text, fmt.Sprintf("%s %d", name, counters[name]))
						}
					}
					return "counted in the last round: " + strings.Join(text, ", ")
				},
			})
		}
	}
	return list, nil
}

// keep makes a device hold the first n bytes of a file that nobody maps.
func (m *mount) keep(name string, n int64, device int) error {
	x, err := m.mapFile(name, 0, n, gaiafs.ProtRead, device)
	if err != nil {
		return err
	}
	return x.Close()
}

// forgetPages makes the kernel forget the bytes of one file.
func forgetPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var left unix.Cachestat_t
	for range 3 { // at first the kernel does not drop pages that are on their way to one of its lists
		if err := dropPages(f); err != nil {
			return err
		}
		if unix.Cachestat(uint(f.Fd()), new(unix.CachestatRange), &left, 0) != nil || left.Cache < mostLeft {
			return nil
		}
	}
	return fmt.Errorf("%s cannot be made cold: %d of its pages stay in the kernel's cache", path, left.Cache)
}

// mostLeft is how many pages of a file may stay in the kernel's cache if it counts as cold: 1 MiB.
const mostLeft = 256

// read reads the first n bytes of a file and returns the speed. Unless the reads are random, it reads each byte at most
// once. It compares some of the reads with home.
func (p readPattern) read(path, home string, n int64) (speed float64, err error) {
	var total, next atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, p.jobs)
	type sample struct {
		off int64
		buf []byte
	}
	samples := make([][]sample, p.jobs)
	size := min(p.size, n)
	blocks := n / size
	flags := os.O_RDONLY
	if p.direct {
		flags |= unix.O_DIRECT
	}
	start := time.Now()
	for j := range p.jobs {
		group.Go(func() {
			f, err := os.OpenFile(path, flags, 0)
			if err != nil {
				errs[j] = err
				return
			}
			defer f.Close()
			rnd := rand.New(rand.NewPCG(uint64(start.UnixNano()), uint64(j)))
			buf := alignedBuffer(size)
			for k := 0; time.Since(start) < readTime && total.Load() < n; k++ {
				i := next.Add(1) - 1
				if p.random {
					i = rnd.Int64N(blocks)
				} else if i >= blocks {
					return
				}
				if _, err := f.ReadAt(buf, i*size); err != nil {
					errs[j] = err
					return
				}
				total.Add(size)
				if k%64 == 0 && len(samples[j]) < 64 {
					samples[j] = append(samples[j], sample{i * size, bytes.Clone(buf)})
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	f, err := os.Open(home)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	want := make([]byte, size)
	for _, of := range samples {
		for _, x := range of {
			if _, err := f.ReadAt(want, x.off); err != nil {
				return 0, err
			}
			if !bytes.Equal(want, x.buf) {
				return 0, fmt.Errorf("wrong bytes: %d at %d of %s differ from the file", size, x.off, path)
			}
		}
	}
	return gigabytes(total.Load(), took), nil
}

// alignedBuffer returns n bytes that O_DIRECT accepts.
func alignedBuffer(n int64) []byte {
	b := make([]byte, n+pageSize)
	skip := -uintptr(unsafe.Pointer(&b[0])) & (pageSize - 1)
	return b[skip:][:n:n]
}
