package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// builtModules are the modules that the Go build compiles: modules that this program was built with, and that need no
// other modules.
var builtModules = map[string]string{
	"golang.org/x/sys":              "unix",
	"github.com/spf13/pflag":        "",
	"github.com/dustin/go-humanize": "",
	"github.com/BurntSushi/toml":    "",
}

// goBuild compiles and links a program whose sources, build cache and output are in one place.
type goBuild struct {
	// sources are the directories of builtModules in the module cache.
	sources map[string]string
	edits   int
}

func buildRows(ctx context.Context, s *session, places []*place) ([]rows.Row, error) {
	b := &goBuild{sources: make(map[string]string)}
	if !s.listing {
		if _, err := exec.LookPath("go"); err != nil {
			return []rows.Row{skippedRow("go build", "there is no go command: https://go.dev/dl/")}, nil
		}
		for module := range builtModules {
			dir, _, err := command(ctx, "", nil, "go", "list", "-m", "-f", "{{.Dir}}", module)
			if err != nil || dir == "" {
				return []rows.Row{skippedRow("go build",
					"run it in the folder of the source of gaiafs, after `go mod download`")}, nil
			}
			b.sources[module] = dir
		}
	}
	s.later(func() {
		for _, p := range places {
			_ = os.RemoveAll(p.path("build"))
		}
	})
	row := perPlace("go build", rows.Seconds, places, b.prepare, func(ctx context.Context, p *place) (float64, error) {
		took, err := b.run(ctx, p)
		return took.Seconds(), err
	})
	row.Targets = []rows.Target{{Against: placeLoopback, Limit: 1.3}}
	return []rows.Row{row}, nil
}

func (b *goBuild) run(ctx context.Context, p *place) (time.Duration, error) {
	env := []string{"GOCACHE=" + p.path("build", "cache"), "GOTMPDIR=" + p.path("build", "tmp"), "GOFLAGS=-mod=mod",
		"GOWORK=off", "GOPROXY=off", "CGO_ENABLED=0"}
	_, took, err := command(ctx, p.path("build"), env, "go", "build", "-o", "program", ".")
	return took, err
}

// prepare makes the sources when it is first called for a place. Each time, it changes every package so that the build
// cache does not have it.
func (b *goBuild) prepare(ctx context.Context, p *place) error {
	if _, err := os.Stat(p.path("build")); err != nil {
		if err := b.lay(p); err != nil {
			return err
		}
		if _, err := b.run(ctx, p); err != nil { // puts the standard library into the cache
			return err
		}
	}
	b.edits++
	for module, sub := range builtModules {
		dir := p.path("build", moduleDir(module), sub)
		text := fmt.Sprintf("package %s\n\nconst benchEdit = %d\n", packageName(module, sub), b.edits)
		if err := os.WriteFile(dir+"/bench_edit.go", []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// lay writes a program that imports the modules, together with their sources.
func (b *goBuild) lay(p *place) error {
	mod := "module program\n\ngo 1.26.0\n"
	program := "package main\n\nimport (\n"
	for module, sub := range builtModules {
		if _, err := copyTree(b.sources[module], p.path("build", moduleDir(module))); err != nil {
			return err
		}
		mod += fmt.Sprintf("require %s v0.0.0\nreplace %s => ./%s\n", module, module, moduleDir(module))
		program += fmt.Sprintf("\t_ %q\n", strings.TrimSuffix(module+"/"+sub, "/"))
	}
	program += ")\n\nfunc main() {}\n"
	return errors.Join(
		os.MkdirAll(p.path("build", "tmp"), 0o755),
		os.WriteFile(p.path("build", "go.mod"), []byte(mod), 0o644),
		os.WriteFile(p.path("build", "main.go"), []byte(program), 0o644),
	)
}

// moduleDir returns where the sources of a module are, relative to the program's.
func moduleDir(module string) string { return strings.ReplaceAll(module, "/", "_") }

// packageName returns the name of a package of builtModules.
func packageName(module, sub string) string {
	name := sub
	if name == "" {
		name = module[strings.LastIndexByte(module, '/')+1:]
	}
	return strings.TrimPrefix(name, "go-")
}
