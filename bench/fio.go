package main

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

//go:embed fio/*.fio
var jobFiles embed.FS

// fioWork is one workload of fio's.
type fioWork struct {
	// pattern is the name of a job file.
	pattern string
	// block is the bytes of one read or write.
	block int64
	jobs  int
	cold  bool
}

func (w *fioWork) String() string {
	temperature := "warm"
	if w.cold {
		temperature = "cold"
	}
	size := fmt.Sprintf("%d KiB", w.block>>10)
	if w.block >= 1<<20 {
		size = fmt.Sprintf("%d MiB", w.block>>20)
	}
	jobs := "1 job"
	if w.jobs > 1 {
		jobs = fmt.Sprintf("%d jobs", w.jobs)
	}
	return fmt.Sprintf("%s %s %s %s", w.pattern, size, temperature, jobs)
}

func (w *fioWork) random() bool { return strings.HasPrefix(w.pattern, "rand") }

// fioSetup is what all fio workloads of a session share.
type fioSetup struct {
	program string
	jobDir  string
	// size is the bytes of each file.
	size    int64
	runtime time.Duration
}

// fioFiles and fioMapped are the names of the files that fio works on, less the number of the job. A device maps the latter.
const (
	fioFiles  = "data"
	fioMapped = "mapped"
	fioJobs   = 4
)

func fioRows(_ context.Context, s *session) ([]rows.Row, error) {
	program, err := exec.LookPath("fio")
	if err != nil {
		return nil, skipped{"fio is not installed: `apt-get install fio` or `dnf install fio`"}
	}
	places, err := s.allPlaces()
	if err != nil {
		return nil, err
	}
	x := fioSetup{program: program, jobDir: filepath.Join(s.dir, "fio"), size: 64 << 20, runtime: 300 * time.Millisecond}
	jobs := fioJobs
	if s.quick {
		x.size, x.runtime, jobs = 32<<20, 100*time.Millisecond, 1
	}
	if err := os.CopyFS(s.dir, jobFiles); err != nil {
		return nil, err
	}
	for _, p := range places {
		for k := range jobs {
			if err := fill(p.home(fmt.Sprintf("%s.%d", fioFiles, k)), x.size); err != nil {
				return nil, err
			}
		}
	}
	if err := fill(places[0].home(fioMapped+".0"), x.size); err != nil {
		return nil, err
	}
	var list []rows.Row
	for _, w := range fioWorkloads(s.quick) {
		r := rows.Row{Group: "fio", Name: w.String(), Unit: rows.MBPerSecond}
		for _, p := range places {
			r.Sides = append(r.Sides, x.side(p, fioFiles, w))
		}
		r.Targets = []rows.Target{{Against: placeLoopback, Limit: 1}, {Against: placeLoopback1M, Limit: 1}}
		list = append(list, r)
	}
	return append(list, x.mappedRows(s, places)...), nil
}

// fioWorkloads returns every combination, or those that tell most.
func fioWorkloads(quick bool) (all []fioWork) {
	for _, pattern := range []string{"read", "randread", "write", "randwrite"} {
		for _, block := range []int64{4 << 10, 1 << 20} {
			if quick {
				all = append(all, fioWork{pattern, block, 1, false})
				continue
			}
			for _, jobs := range []int{1, fioJobs} {
				all = append(all, fioWork{pattern, block, jobs, false}, fioWork{pattern, block, jobs, true})
			}
		}
	}
	if quick {
		all = append(all, fioWork{"read", 1 << 20, 1, true}, fioWork{"randread", 4 << 10, 1, true})
	}
	return all
}

// mappedRows compare a file that a device maps for writing, so that every request consults the page cache.
func (x *fioSetup) mappedRows(s *session, places []*place) []rows.Row {
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
		f, err := os.OpenFile(places[0].path(fioMapped+".0"), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		mapping, err = gaiafs.Map(f, 0, x.size, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
		return err
	}
	var list []rows.Row
	for _, pattern := range []string{"read", "randread", "write", "randwrite"} {
		for _, block := range []int64{4 << 10, 1 << 20} {
			if s.quick && (pattern != "read" || block < 1<<20) && (pattern != "randwrite" || block > 4<<10) {
				continue
			}
			w := fioWork{pattern, block, 1, false}
			r := rows.Row{Group: "fio", Name: w.String() + ", mapped by a device", Unit: rows.MBPerSecond}
			mine := x.side(places[0], fioMapped, w)
			warm := mine.Prepare
			mine.Prepare = func(ctx context.Context) error {
				if err := keep(); err != nil {
					return err
				}
				return warm(ctx)
			}
			r.Sides = append(r.Sides, mine)
			for _, p := range places[1:] {
				r.Sides = append(r.Sides, x.side(p, fioFiles, w))
			}
			list = append(list, r)
		}
	}
	return list
}

// side has fio do w on the files of that name in p.
func (x *fioSetup) side(p *place, name string, w fioWork) rows.Side {
	var files []string
	for k := range w.jobs {
		files = append(files, fmt.Sprintf("%s.%d", name, k))
	}
	return rows.Side{
		Name: p.name,
		Prepare: func(ctx context.Context) error {
			if w.cold {
				return p.dropCaches(files...)
			}
			for _, f := range files {
				if err := p.warm(ctx, f); err != nil {
					return err
				}
			}
			return nil
		},
		Measure: func(ctx context.Context) (float64, error) { return x.run(ctx, p, name, w) },
	}
}

// run returns the MB (10^6 bytes) per second that fio reports.
func (x *fioSetup) run(ctx context.Context, p *place, name string, w fioWork) (float64, error) {
	// A warm file may be gone through as often as the time allows. A cold one is only cold once; of random pages so many
	// are read or written as take a moment.
	amount, timeBased, limit := x.size, 1, x.runtime
	if w.cold {
		timeBased, limit = 0, 5*time.Second
		if w.random() && w.block < 1<<20 {
			amount = min(amount, 8<<20)
		}
	}
	cmd := exec.CommandContext(ctx, x.program, "--output-format=json", filepath.Join(x.jobDir, w.pattern+".fio"))
	cmd.Dir = x.jobDir
	cmd.Env = append(os.Environ(),
		"DIR="+p.dir, "NAME="+name,
		fmt.Sprintf("BS=%d", w.block), fmt.Sprintf("SIZE=%d", x.size), fmt.Sprintf("IO_SIZE=%d", amount),
		fmt.Sprintf("JOBS=%d", w.jobs), fmt.Sprintf("TIME_BASED=%d", timeBased), fmt.Sprintf("RUNTIME=%dms", limit.Milliseconds()))
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(said.String()+out.String()))
	}
	rate, err := fioRate(out.Bytes())
	if err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	return rate / 1e6, nil
}

// fioRate returns the bytes per second, of reads and writes together, in fio's JSON output. What comes before the document,
// which fio begins with its warnings, is passed over.
func fioRate(out []byte) (float64, error) {
	start := bytes.IndexByte(out, '{')
	if start < 0 {
		return 0, errors.New("no JSON in the output")
	}
	type direction struct {
		Rate float64 `json:"bw_bytes"`
	}
	var doc struct {
		Jobs []struct {
			Error       int `json:"error"`
			Read, Write direction
		} `json:"jobs"`
	}
	if err := json.Unmarshal(out[start:], &doc); err != nil {
		return 0, err
	}
	var rate float64
	for _, j := range doc.Jobs {
		if j.Error != 0 {
			return 0, fmt.Errorf("a job failed with error %d", j.Error)
		}
		rate += j.Read.Rate + j.Write.Rate
	}
	if rate == 0 {
		return 0, errors.New("nothing was transferred")
	}
	return rate, nil
}
