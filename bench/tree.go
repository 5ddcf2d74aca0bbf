package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func treeRows(ctx context.Context, s *session) ([]rows.Row, error) {
	places, err := s.threePlaces()
	if err != nil {
		return nil, err
	}
	list := smallFileRows(s, places)
	git, err := gitRows(ctx, s, places)
	if err != nil {
		return nil, err
	}
	list = append(list, git...)
	if s.Quick {
		return append(list, skippedRow("go build", "takes longer than --quick has")), nil
	}
	build, err := buildRows(ctx, s, places)
	return append(list, build...), err
}

// skippedRow is the table row for rows that cannot run here.
func skippedRow(name, reason string) rows.Row {
	return rows.Row{Group: "tree", Name: name, Skip: reason}
}

// againstLoopback is the target of rows that do not depend on the size of requests.
var againstLoopback = []rows.Target{{Against: placeLoopback, Limit: 1}}

// perPlace makes a row with a side for each place.
func perPlace(name string, u rows.Unit, places []*place, prepare func(context.Context, *place) error,
	measure func(context.Context, *place) (float64, error)) rows.Row {
	r := rows.Row{Group: "tree", Name: name, Unit: u, Targets: againstLoopback}
	for _, p := range places {
		x := rows.Side{Name: p.name, Measure: func(ctx context.Context) (float64, error) { return measure(ctx, p) }}
		if prepare != nil {
			x.Prepare = func(ctx context.Context) error { return prepare(ctx, p) }
		}
		r.Sides = append(r.Sides, x)
	}
	return r
}

// command runs a program and returns what it printed, and how long it took.
func command(ctx context.Context, dir string, env []string, name string,
	args ...string) (string, time.Duration, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = 5 * time.Second
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	start := time.Now()
	err := cmd.Run()
	took := time.Since(start)
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(said.String()))
	}
	return strings.TrimSpace(out.String()), took, err
}

// gitRows clone a repository that is made on the spot from Go's own source tree: thousands of real files.
func gitRows(ctx context.Context, s *session, places []*place) ([]rows.Row, error) {
	var source string
	if !s.listing {
		if _, err := exec.LookPath("git"); err != nil {
			return []rows.Row{skippedRow("git", "git is not installed: `apt-get install git` or `dnf install git`")},
				nil
		}
		var err error
		if source, _, err = command(ctx, "", nil, "go", "env", "GOROOT"); err != nil {
			return []rows.Row{skippedRow("git",
				"there is no go command, which provides the source tree: https://go.dev/dl/")}, nil
		}
	}
	origin := filepath.Join(s.dir, "origin")
	// Git must not start background work by itself, which would disturb the measurements.
	env := []string{"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=" + os.DevNull, "GIT_CONFIG_COUNT=2",
		"GIT_CONFIG_KEY_0=gc.auto", "GIT_CONFIG_VALUE_0=0", "GIT_CONFIG_KEY_1=maintenance.auto",
		"GIT_CONFIG_VALUE_1=false"}
	var files int
	make := func(ctx context.Context) error {
		if files > 0 {
			return nil
		}
		parts := []string{"archive", "cmd", "crypto", "encoding", "go", "internal", "net", "runtime", "syscall"}
		if s.Quick {
			parts = []string{"encoding", "go", "net"}
		}
		for _, part := range parts {
			n, err := copyTree(filepath.Join(source, "src", part), filepath.Join(origin, part))
			if err != nil {
				return err
			}
			files += n
		}
		for _, args := range [][]string{
			{"init", "-q", "-b", "main"}, {"add", "-A"},
			{"-c", "user.name=bench", "-c", "user.email=bench@localhost", "commit", "-q", "-m", "tree"},
			{"gc", "-q"},
		} {
			if _, _, err := command(ctx, origin, env, "git", args...); err != nil {
				return err
			}
		}
		return nil
	}
	clone := func(ctx context.Context, p *place) (float64, error) {
		_, took, err := command(ctx, p.dir, env, "git", "clone", "-q", "--no-hardlinks", origin, "clone")
		return took.Seconds(), err
	}
	absent := func(ctx context.Context, p *place) error {
		return errors.Join(make(ctx), os.RemoveAll(p.path("clone")))
	}
	present := func(ctx context.Context, p *place) error {
		if err := make(ctx); err != nil {
			return err
		}
		if _, err := os.Stat(p.path("clone")); err == nil {
			return nil
		}
		_, err := clone(ctx, p)
		return err
	}
	list := []rows.Row{
		perPlace("git clone", rows.Seconds, places, absent, clone),
		perPlace("git status of the clone", rows.Seconds, places, present,
			func(ctx context.Context, p *place) (float64, error) {
				_, took, err := command(ctx, p.path("clone"), env, "git", "status", "--porcelain")
				return took.Seconds(), err
			}),
		perPlace("git grep in the clone, cold", rows.Seconds, places,
			func(ctx context.Context, p *place) error {
				return errors.Join(present(ctx, p), dropNames())
			},
			func(ctx context.Context, p *place) (float64, error) {
				_, took, err := command(ctx, p.path("clone"), env, "git", "grep", "-c", "func main", "--", "*.go")
				return took.Seconds(), err
			}),
		perPlace("rm -r of the clone", rows.Seconds, places, present,
			func(ctx context.Context, p *place) (float64, error) {
				_, took, err := command(ctx, p.dir, nil, "rm", "-r", "clone")
				return took.Seconds(), err
			}),
	}
	list[0].Targets = []rows.Target{{Against: placeLoopback, Limit: 1.3}}
	list[0].Note = func() string { return fmt.Sprintf("%d files", files) }
	return list, nil
}

// copyTree copies the regular files below from to to, and returns their number.
func copyTree(from, to string) (files int, err error) {
	err = filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		if e.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		if !e.Type().IsRegular() {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		return os.WriteFile(target, content, 0o644)
	})
	return files, err
}

// smallFileRows make, inspect and remove many small files, one after another.
func smallFileRows(s *session, places []*place) []rows.Row {
	dirs, perDir := 20, 100
	if s.Quick {
		dirs = 5
	}
	total := float64(dirs * perDir)
	content := bytes.Repeat([]byte("gaia"), 256)
	dirOf := func(p *place, d int) string { return p.path("small", fmt.Sprintf("d%d", d)) }
	each := func(p *place, fn func(path string) error) error {
		for d := range dirs {
			for f := range perDir {
				if err := fn(filepath.Join(dirOf(p, d), fmt.Sprintf("f%d", f))); err != nil {
					return err
				}
			}
		}
		return nil
	}
	create := func(p *place) error {
		return each(p, func(path string) error { return os.WriteFile(path, content, 0o644) })
	}
	empty := func(_ context.Context, p *place) error {
		err := os.RemoveAll(p.path("small"))
		for d := 0; d < dirs && err == nil; d++ {
			err = os.MkdirAll(dirOf(p, d), 0o755)
		}
		return err
	}
	full := func(ctx context.Context, p *place) error {
		if _, err := os.Stat(filepath.Join(dirOf(p, dirs-1), fmt.Sprintf("f%d", perDir-1))); err == nil {
			return nil
		}
		return errors.Join(empty(ctx, p), create(p))
	}
	cold := func(ctx context.Context, p *place) error { return errors.Join(full(ctx, p), dropNames()) }
	timed := func(work func(p *place) error) func(context.Context, *place) (float64, error) {
		return func(_ context.Context, p *place) (float64, error) {
			start := time.Now()
			err := work(p)
			return total / time.Since(start).Seconds(), err
		}
	}
	list := func(p *place) error {
		for d := range dirs {
			entries, err := os.ReadDir(dirOf(p, d))
			if err != nil {
				return err
			}
			if len(entries) != perDir {
				return fmt.Errorf("%s has %d entries instead of %d", dirOf(p, d), len(entries), perDir)
			}
			for _, e := range entries {
				if _, err := e.Info(); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return []rows.Row{
		perPlace("create 1 KiB files", rows.PerSecond, places, empty, timed(create)),
		perPlace("stat by name, cold", rows.PerSecond, places, cold, timed(func(p *place) error {
			return each(p, func(path string) error { _, err := os.Lstat(path); return err })
		})),
		perPlace("readdir and stat, cold", rows.PerSecond, places, cold, timed(list)),
		perPlace("read 1 KiB files, cold names", rows.PerSecond, places, cold, timed(func(p *place) error {
			return each(p, func(path string) error { _, err := os.ReadFile(path); return err })
		})),
		perPlace("read 1 KiB files, warm", rows.PerSecond, places, full, timed(func(p *place) error {
			return each(p, func(path string) error { _, err := os.ReadFile(path); return err })
		})),
		perPlace("unlink", rows.PerSecond, places, full, timed(func(p *place) error { return each(p, os.Remove) })),
	}
}
