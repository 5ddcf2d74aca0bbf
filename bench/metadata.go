package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// nameSet is a directory of empty files. Each of several jobs works on files of its own.
type nameSet struct {
	dir   string
	jobs  int
	files int // per job
}

func (n *nameSet) path(letter string, job, file int) string {
	return filepath.Join(n.dir, fmt.Sprintf("%s%d-%d", letter, job, file))
}

// each makes every job call fn for its files, all jobs at once, and returns how long that took.
func (n *nameSet) each(ctx context.Context, fn func(job, file int) error) (time.Duration, error) {
	errs := make([]error, n.jobs)
	var wg sync.WaitGroup
	start := time.Now()
	for job := range n.jobs {
		wg.Go(func() {
			for file := 0; file < n.files && errs[job] == nil; file++ {
				if errs[job] = fn(job, file); errs[job] == nil {
					errs[job] = ctx.Err()
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start), errors.Join(errs...)
}

// empty removes all files of the directory.
func (n *nameSet) empty() error {
	return errors.Join(os.RemoveAll(n.dir), os.Mkdir(n.dir, 0o755))
}

// full makes all files of the directory.
func (n *nameSet) full(ctx context.Context) error {
	if err := n.empty(); err != nil {
		return err
	}
	_, err := n.each(ctx, n.create)
	return err
}

func (n *nameSet) create(job, file int) error {
	f, err := os.OpenFile(n.path("f", job, file), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// count fails unless the directory has want entries, with names that begin with letter.
func (n *nameSet) count(letter string, want int) error {
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name()[:1] != letter {
			return fmt.Errorf("%s has an entry %s", n.dir, e.Name())
		}
	}
	if len(entries) != want {
		return fmt.Errorf("%s has %d entries instead of %d", n.dir, len(entries), want)
	}
	return nil
}

// metadataRows measure operations on names: one directory of empty files, with one job and with many.
func metadataRows(_ context.Context, s *session) ([]rows.Row, error) {
	places, err := s.threePlaces()
	if err != nil {
		return nil, err
	}
	files, jobs := 1024, []int{1, 16}
	if s.Quick {
		files, jobs = 256, []int{1}
	}
	s.later(func() {
		for _, p := range places {
			_ = os.RemoveAll(p.path("names"))
		}
	})
	var list []rows.Row
	for _, j := range jobs {
		for _, o := range nameOperations() {
			list = append(list, o.row(places, j, files))
		}
	}
	return list, nil
}

// nameOperation is an operation on each name of a directory.
type nameOperation struct {
	name    string
	prepare func(ctx context.Context, n *nameSet) error
	once    func(n *nameSet, job, file int) error
	// left is the first letter of the names that exist afterwards, or "" if none exist.
	left string
}

func nameOperations() []nameOperation {
	full := func(ctx context.Context, n *nameSet) error { return n.full(ctx) }
	cold := func(ctx context.Context, n *nameSet) error { return errors.Join(n.full(ctx), dropNames()) }
	stat := func(n *nameSet, job, file int) error { _, err := os.Lstat(n.path("f", job, file)); return err }
	// A job lists the directory once, not once per file. Each entry counts as an operation.
	list := func(n *nameSet, _, file int) error {
		if file > 0 {
			return nil
		}
		return n.count("f", n.jobs*n.files)
	}
	return []nameOperation{
		{"create", func(_ context.Context, n *nameSet) error { return n.empty() }, (*nameSet).create, "f"},
		{"stat", full, stat, "f"},
		{"stat, cold", cold, stat, "f"},
		{"readdir", full, list, "f"},
		{"readdir, cold", cold, list, "f"},
		{"rename", full, func(n *nameSet, job, file int) error {
			return os.Rename(n.path("f", job, file), n.path("g", job, file))
		}, "g"},
		{"unlink", full, func(n *nameSet, job, file int) error { return os.Remove(n.path("f", job, file)) }, ""},
	}
}

// row compares the places. files is the number of files of all jobs together.
func (o nameOperation) row(places []*place, jobs, files int) rows.Row {
	name := o.name + ", 1 job"
	if jobs > 1 {
		name = fmt.Sprintf("%s, %d jobs", o.name, jobs)
	}
	r := rows.Row{Group: "metadata", Name: name, Unit: rows.PerSecond, Targets: againstLoopback,
		Labels: map[string]string{"operation": o.name, "jobs": fmt.Sprint(jobs)}}
	for _, p := range places {
		n := &nameSet{dir: p.path("names"), jobs: jobs, files: files / jobs}
		entries := jobs * n.files
		if o.name == "readdir" || o.name == "readdir, cold" {
			entries *= jobs // every job sees all files
		}
		r.Sides = append(r.Sides, rows.Side{
			Name:    p.name,
			Prepare: func(ctx context.Context) error { return o.prepare(ctx, n) },
			Measure: func(ctx context.Context) (float64, error) {
				took, err := n.each(ctx, func(job, file int) error { return o.once(n, job, file) })
				return float64(entries) / took.Seconds(), err
			},
			Check: func(context.Context) error {
				want := jobs * n.files
				if o.left == "" {
					want = 0
				}
				home := *n
				home.dir = p.home("names")
				return errors.Join(n.count(o.left, want), home.count(o.left, want))
			},
		})
	}
	return r
}
