package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

func gigabytes(n int64, took time.Duration) float64 { return float64(n) / 1e9 / took.Seconds() }
func ms(d time.Duration) float64                    { return float64(d.Nanoseconds()) / 1e6 }

// sizeText formats a size.
func sizeText(n int64) string {
	switch {
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// gaiafsLoad is the side that maps the first n bytes of the data file on the first GPU, which has none of them. ready
// sets up the state of the file before that.
func (s *session) gaiafsLoad(d *dataFile, n int64, ready func() error) rows.Side {
	g := s.gpus[0]
	return rows.Side{
		Name: "gaiafs",
		Prepare: func(context.Context) error {
			return errors.Join(s.mount.forget(d.name, 0, d.size, g.device()), ready())
		},
		Measure: func(context.Context) (float64, error) {
			f, err := s.mount.open(d.name)
			if err != nil {
				return 0, err
			}
			defer f.Close()
			var m *gaiafs.Mapping
			var took time.Duration
			counters, err := s.mount.counted(func() error {
				start := time.Now()
				m, err = gaiafs.Map(f, 0, n, gaiafs.ProtRead, g.device(), gaiafs.Stays())
				took = time.Since(start)
				return err
			})
			if err != nil {
				return 0, err
			}
			if filled, want := counters["filled_pages"], (n+pageSize-1)/pageSize; filled != want {
				err = fmt.Errorf("%d pages were brought to the device, and not all %d: it had the others", filled, want)
			}
			return gigabytes(n, took), errors.Join(err, s.check.data(g, addressOf(m), n, d), m.Close())
		},
	}
}

// coldRound is roughly how long a round reads the disk.
const coldRound = 4 * time.Second

// coldRows load a file that is only on the disk.
func coldRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	if err := s.mount.lockNothing(ctx, s.program); err != nil {
		return nil, err
	}
	path := s.mount.home(d.name)
	drop := func() error { _, err := dropCaches(path); return err }
	all, err := dropCaches(path)
	if err != nil {
		return nil, err
	}
	// A slow disk reads less: its speed shows within a few seconds.
	first := min(d.size, 512<<20)
	took, err := readDirect(path, first)
	if errors.Is(err, syscall.EINVAL) { // from open: the filesystem has no O_DIRECT
		return []rows.Row{{Group: "cold", Name: "cold file to VRAM", Skip: err.Error()}}, nil
	}
	if err != nil {
		return nil, err
	}
	n := min(d.size, max(1<<30, int64(float64(first)*coldRound.Seconds()/took.Seconds())&^(pieceSize-1)))
	disk := "disk, O_DIRECT"
	note := fmt.Sprintf("the disk gets %d requests of %s at once", directReads, sizeText(directRead))
	if !all {
		note += "; without permission to drop all caches, only the file's pages were dropped"
	}
	return []rows.Row{{
		Group: "cold", Name: "cold file to VRAM, " + sizeText(n), Unit: rows.GBPerSecond,
		Sides: []rows.Side{
			s.gaiafsLoad(d, n, drop),
			{Name: disk, Prepare: func(context.Context) error { return drop() },
				Measure: func(context.Context) (float64, error) {
					took, err := readDirect(path, n)
					return gigabytes(n, took), err
				}},
		},
		Targets: []rows.Target{{Against: disk, Limit: 0.95}},
		Note:    func() string { return note },
	}}, nil
}

// Names of the other sides of loading.
const (
	sidePageable    = "read + copy, pageable"
	sideDouble      = "read + copy, pinned, 1 reader"
	sideReaders     = "read + copy, pinned, 8 readers"
	sideSafetensors = "safetensors"
	sideCuFile      = "cuFile, compatibility mode"
)

// warmRows load a file that is in the kernel's cache.
func warmRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	g, path := s.gpus[0], s.mount.home(d.name)
	warm := func() error { return warmUp(path, d.size) }
	r := rows.Row{Group: "warm", Name: "host-warm file to VRAM, " + sizeText(d.size), Unit: rows.GBPerSecond,
		Sides: []rows.Side{s.gaiafsLoad(d, d.size, warm)}, Targets: []rows.Target{{Limit: 30}}}
	add := func(name string, load func() (time.Duration, error)) {
		r.Sides = append(r.Sides, rows.Side{
			Name:    name,
			Prepare: func(context.Context) error { return warm() },
			Measure: func(context.Context) (float64, error) {
				took, err := load()
				return gigabytes(d.size, took), err
			},
		})
		r.Targets = append(r.Targets, rows.Target{Against: name, Limit: 1})
	}
	loaders := []struct {
		name  string
		fresh loader
	}{{sidePageable, s.loadPageable}, {sideDouble, s.loadPinned(1, 1)}, {sideReaders, s.loadPinned(8, 2)}}
	checked := make(map[string]bool)
	for _, l := range loaders {
		add(l.name, func() (time.Duration, error) {
			start := time.Now()
			to, err := g.alloc(d.size)
			if err != nil {
				return 0, err
			}
			err = l.fresh(path, g, to, d.size)
			took := time.Since(start)
			if err == nil && !checked[l.name] { // the comparison does the same work
				checked[l.name] = true
				err = s.check.data(g, to, d.size, d)
			}
			return took, errors.Join(err, g.free(to))
		})
	}
	notes := []string{"all sides allocate device memory within the measured time, and pin host memory before it"}
	for _, x := range []struct {
		name  string
		o     order
		start func() (c *child, note string, err error)
	}{
		{sideSafetensors, order{Do: "load", Path: path, Size: d.size}, func() (*child, string, error) {
			c, err := startSafetensors(ctx, s.python, g.device())
			return c, "", err
		}},
		{sideCuFile, order{Do: "cufile", Path: path, Size: d.size, Log: s.cuFileFolder()},
			func() (*child, string, error) { return s.startCuFile(ctx, path) }},
	} {
		c, note, err := x.start()
		var a answer
		if err == nil {
			s.later(c.end)
			first := x.o // a warm-up for one-time work; its result is checked
			first.Pieces = d.looked()
			if a, err = c.do(first); err == nil && x.o.Do == "cufile" {
				err = d.same(a.Sums)
			}
		}
		if err != nil { // a side that cannot run here is left out, and the table says why
			notes = append(notes, fmt.Sprintf("no %s: %s", x.name, strings.ReplaceAll(err.Error(), "\n", "; ")))
			continue
		}
		for _, n := range []string{note, a.Note} {
			if n != "" {
				notes = append(notes, n)
			}
		}
		add(x.name, func() (time.Duration, error) {
			a, err := c.do(x.o)
			return a.Took, err
		})
	}
	r.Note = func() string { return strings.Join(notes, "; ") }
	return []rows.Row{r}, nil
}

// cuFileFolder is the folder of cuFile's configuration and log.
func (s *session) cuFileFolder() string { return filepath.Join(s.dir, "cufile") }

// startCuFile starts a worker in which cuFile is configured, and in which udev knows the disk of the file. note says
// what was done for that.
func (s *session) startCuFile(ctx context.Context, path string) (c *child, note string, err error) {
	environment, err := configureCuFile(s.cuFileFolder())
	if err != nil {
		return nil, "", err
	}
	start := func(attributes *syscall.SysProcAttr) (*child, error) {
		return startWorkerIn(ctx, attributes, s.options.gpus, s.gpus[0].device(), environment...)
	}
	name, text, err := udevRecord(path)
	if err != nil {
		return nil, "", err
	}
	if name != "" {
		outside, err := mountNamespace()
		if err != nil {
			return nil, "", err
		}
		c, err := start(&syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS})
		if err == nil {
			kept := filepath.Join(s.cuFileFolder(), "run")
			if _, err = c.do(order{Do: "udev", Outside: outside, Kept: kept, Name: name, Text: text}); err == nil {
				return c, "udev does not know the disk here, so cuFile was given the record that it needs", nil
			}
			c.end()
		}
		note = fmt.Sprintf("udev does not know the disk, and cuFile could not be given a record (%v)", err)
	}
	c, err = start(new(syscall.SysProcAttr))
	return c, note, err
}
