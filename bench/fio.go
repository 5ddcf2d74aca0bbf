package bench

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
	"strconv"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
)

//go:embed fio/*.fio
var jobFiles embed.FS

// fioWork is one workload of fio.
type fioWork struct {
	// pattern is the name of a job file.
	pattern string
	// block is the size of one read or write in bytes.
	block int64
	jobs  int
	state state
}

func (w *fioWork) String() string {
	jobs := "1 job"
	if w.jobs > 1 {
		jobs = fmt.Sprintf("%d jobs", w.jobs)
	}
	return fmt.Sprintf("%s %s %s %s", w.pattern, blockText(w.block), w.state, jobs)
}

// blockText formats a size in whole KiB or MiB.
func blockText(n int64) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

func (w *fioWork) random() bool { return strings.HasPrefix(w.pattern, "rand") }
func (w *fioWork) writes() bool { return strings.HasSuffix(w.pattern, "write") }

func (w *fioWork) labels() map[string]string {
	return map[string]string{"pattern": w.pattern, "block": strconv.FormatInt(w.block, 10),
		"jobs": strconv.Itoa(w.jobs), "state": string(w.state)}
}

// fio runs fio. It holds what all workloads of a session share.
type fio struct {
	session *session
	program string
	jobDir  string
	// runtime is the duration of a workload that can run for any time. few is how many bytes of random pages a disk
	// serves in a moment.
	runtime time.Duration
	few     int64
}

// fioHint says how to get fio.
const fioHint = "fio is not installed: `apt-get install fio` or `dnf install fio`"

// newFio looks for fio and writes the job files.
func newFio(s *session) (*fio, error) {
	if s.listing {
		return &fio{session: s}, nil
	}
	program, err := exec.LookPath("fio")
	if err != nil {
		return nil, rows.Impossible{Reason: fioHint}
	}
	x := &fio{session: s, program: program, jobDir: filepath.Join(s.dir, "fio"), runtime: 300 * time.Millisecond,
		few: 16 << 20}
	if s.Quick {
		x.runtime, x.few = 100*time.Millisecond, 8<<20
	}
	if err := os.RemoveAll(x.jobDir); err != nil {
		return nil, err
	}
	return x, os.CopyFS(s.dir, jobFiles)
}

// side makes the side that runs w with fio on the file d of p.
func (x *fio) side(p *place, d *dataFile, w fioWork) rows.Side {
	side := rows.Side{
		Name:    p.name,
		Prepare: func(ctx context.Context) error { return x.session.enter(ctx, w.state, p, d) },
		Measure: func(ctx context.Context) (float64, error) { return x.measure(ctx, p, d, w) },
	}
	if w.writes() {
		side.Check = func(ctx context.Context) error { return x.verify(ctx, p, d, w) }
		return side
	}
	return d.reading(side, func(context.Context) error { return d.checkBytes(p) })
}

// fits reports whether every job has at least one block.
func (w *fioWork) fits(d *dataFile) bool { return d.size/int64(w.jobs) >= w.block }

// part returns how many bytes of the file each job has.
func (w *fioWork) part(d *dataFile) int64 { return d.size / int64(w.jobs) / w.block * w.block }

// measure returns the MB (10^6 bytes) per second that fio reports.
func (x *fio) measure(ctx context.Context, p *place, d *dataFile, w fioWork) (float64, error) {
	// A host-warm file may be read again and again for the whole time. A cold file is cold only once. Of random pages,
	// only as many are used as a disk serves in a moment.
	amount, timeBased, limit := w.part(d), 1, x.runtime
	if w.state != hostWarm {
		timeBased, limit = 0, 5*time.Second
		if w.random() && w.block < 128<<10 {
			amount = min(amount, max(x.few/int64(w.jobs), w.block))
		}
	}
	out, err := x.run(ctx, p, d, w, w.pattern, fmt.Sprintf("IO_SIZE=%d", amount),
		fmt.Sprintf("TIME_BASED=%d", timeBased),
		fmt.Sprintf("RUNTIME=%dms", limit.Milliseconds()))
	if err != nil {
		return 0, err
	}
	rate, err := fioRate(out)
	if err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	return rate / 1e6, nil
}

// verifyBytes is how many bytes are written and read back for verification.
const verifyBytes = 8 << 20

// verify makes fio write, read back and compare, and compares the mount with the backing file.
func (x *fio) verify(ctx context.Context, p *place, d *dataFile, w fioWork) error {
	few := w
	few.jobs = min(w.jobs, int(max(verifyBytes/w.block, 1)))
	less := &dataFile{name: d.name, size: max(min(d.size, verifyBytes), int64(few.jobs)*w.block)}
	if _, err := x.run(ctx, p, less, few, "verify", "RW="+w.pattern); err != nil {
		return err
	}
	if p.home() == p.path() {
		return nil
	}
	if err := dropPages(p.path(d.name)); err != nil { // dropPages syncs first
		return err
	}
	return p.agrees(d)
}

// run runs a job file with fio and returns its report.
func (x *fio) run(ctx context.Context, p *place, d *dataFile, w fioWork, job string,
	variables ...string) ([]byte, error) {
	args := []string{"--output-format=json"}
	if !w.writes() {
		args = append(args, "--readonly")
	}
	cmd := exec.CommandContext(ctx, x.program, append(args, filepath.Join(x.jobDir, job+".fio"))...)
	cmd.Dir = x.jobDir
	cmd.WaitDelay = 5 * time.Second
	cmd.Env = append(os.Environ(),
		// fio treats a colon in a name as a separator.
		"FILE="+strings.ReplaceAll(p.path(d.name), ":", `\:`),
		fmt.Sprintf("BS=%d", w.block), fmt.Sprintf("SIZE=%d", w.part(d)), fmt.Sprintf("STEP=%d", w.part(d)),
		fmt.Sprintf("JOBS=%d", w.jobs))
	cmd.Env = append(cmd.Env, variables...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(said.String()+out.String()))
	}
	return out.Bytes(), nil
}

// fioRate returns the bytes per second in fio's JSON output, reads and writes together. It skips fio's warnings before
// the JSON.
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
