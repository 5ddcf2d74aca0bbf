package arrows

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/gaiafs/gaiafs"

// Modules outside the standard library.
const (
	fuse       = "github.com/hanwen/go-fuse/v2/..."
	sys        = "golang.org/x/sys/..."
	purego     = "github.com/ebitengine/purego/..."
	ristretto  = "github.com/dgraph-io/ristretto/v2/..."
	bubbletea  = "charm.land/bubbletea/v2/..."
	cobra      = "github.com/spf13/cobra/..."
	pflag      = "github.com/spf13/pflag/..."
	toml       = "github.com/BurntSushi/toml/..."
	humanize   = "github.com/dustin/go-humanize/..."
	runewidth  = "github.com/mattn/go-runewidth/..."
	sync       = "golang.org/x/sync/..."
	prometheus = "github.com/prometheus/client_golang/..."
	systemd    = "github.com/coreos/go-systemd/v22/daemon"
	xnet       = "golang.org/x/net/netutil"
	testify    = "github.com/stretchr/testify/..."
	rapid      = "pgregory.net/rapid/..."
	porcupine  = "github.com/anishathalye/porcupine"
	goleak     = "go.uber.org/goleak/..."
)

// rule says what the packages of a folder may import, as import paths; paths of gaiafs are relative to the module's
// root. A path that ends with /... includes everything below it. The standard library and the folder itself are always
// allowed.
type rule struct {
	folder  string
	imports []string
	// support marks a folder that helps tests: only tests and other support folders may import it.
	support bool
}

// rules are in the order of the layers, the lowest first. For a package, the longest matching folder counts.
var rules = []rule{
	{"internal/page", nil, false},
	{"internal/arrows", nil, false},
	{"internal/locktree", nil, false},
	{"internal/mapped", nil, false},
	{"internal/plants", nil, false},
	{"internal/ratchet", nil, false},
	{"internal/cost", nil, false},
	{"internal/choices", nil, false},
	{"internal/rundir", []string{sys}, false},
	{"internal/testsummary", nil, false},
	{"internal/model", []string{"internal/page", "versions"}, false},
	{"versions", []string{"internal/page"}, false},
	{"lrc", []string{"versions", "internal/page", "golang.org/x/sys/cpu"}, false},
	{"gpubackend", []string{"internal/page", "internal/mapped", sys, purego}, false},
	{"prefetch", []string{"internal/page", "internal/choices"}, false},
	{"pagecache", []string{"pagecache/live", "lrc", "versions", "gpubackend", "prefetch", "prefetch/trace",
		"internal/page", "internal/cost", humanize, sys, sync}, false},
	// The rooms of pagecache know neither each other nor the rules that pagecache executes. Exception: all transfers
	// pass the mover, and the kernel's room hands its drains back to lrc.
	{"pagecache/live", nil, false},
	{"pagecache/kernel", []string{"lrc", "internal/page"}, false},
	{"pagecache/home", []string{"pagecache/mover", "internal/page"}, false},
	{"pagecache/mover", []string{"internal/page", "internal/mapped", "internal/cost", "gpubackend", "pagecache/live"},
		false},
	{"pagecache/cleanread", []string{"pagecache/mover", "gpubackend", "prefetch", "internal/page", "internal/cost",
		ristretto, sys}, false},
	{"pagecache/mover/schedule", []string{"internal/page", "internal/choices"}, false},
	{"pagecache/residency", []string{"internal/page", "gpubackend", humanize}, false},
	{"pagecache/residency/policy", []string{"internal/page", "internal/choices"}, false},
	{"pagecache/residency/tenants", []string{humanize}, false},
	{"pagecache/residency/shortage", []string{humanize}, false},
	{"pagecache/residency/score", []string{"pagecache/residency/policy", "prefetch/trace", "prefetch/replay"}, false},
	{"pagecache/view", []string{"internal/page"}, false},
	{"fs", []string{"pagecache", "pagecache/live", "internal/page", "internal/mapped", fuse, sys, sync}, false},
	{"control", []string{"pagecache", "pagecache/live", "pagecache/view", "internal/page", sys, sync}, false},
	// Tests of sessions need memory that clients can map.
	{"control/controltest", []string{"control", "pagecache", "pagecache/view", "gpubackend", "gpubackend/emulated",
		"internal/page", sys}, true},
	{"client", []string{sys, purego}, false},
	{"cmd/gaiafs", []string{"fs", "pagecache", "pagecache/live", "control", "gpubackend", "gpubackend/emulated",
		"gpubackend/cuda", "client/go", "prefetch", "prefetch/trace", "prefetch/replay", "pagecache/residency/policy",
		"pagecache/residency/score", "bench", "internal/page", "internal/rundir", bubbletea, runewidth, cobra, pflag, toml,
		humanize, systemd, sys}, false},
	// Figures of a mount for Prometheus and browsers.
	{"cmd/gaiafs/monitor", []string{"pagecache", "internal/page", prometheus, xnet}, false},
	{"cmd/gaiafs/demo", []string{"client/go", "internal/page", sys}, false},
	// The bench measures through the mount and the client, as a user would. The program that contains it makes the
	// mounts. Loopback is for comparison.
	{"bench", []string{"client/go", "internal/page", "internal/rundir", sys, humanize}, false},
	{"bench/rows", []string{sys}, false},
	// It implements everything else that GPU programs do by itself.
	{"bench/gpu", []string{"client/go", "bench/rows", purego, sys}, false},
	{"bench/parts", []string{"gpubackend", "gpubackend/emulated", "lrc", "versions", "internal/page"}, false},
	{"bench/loopback", []string{fuse, sys}, false},
	{"bench/plot", nil, false},
	// These folders support the tests of several packages. Nothing else may import them.
	{"gpubackend/conformance", []string{"gpubackend", "internal/page", testify, rapid, sys}, true},
	{"gpubackend/faulty", []string{"gpubackend", "internal/page"}, true},
	{"internal/fakecuda", []string{testify}, true},
	{"internal/testdevice", []string{"gpubackend", "gpubackend/emulated", "gpubackend/cuda"}, true},
	{"internal/hungfs", []string{fuse, testify, sys}, true},
	{"internal/testdisk", []string{testify, sys}, true},
	{"internal/testmount", []string{"client/go", "control", "fs", "gpubackend", "gpubackend/emulated",
		"gpubackend/faulty", "pagecache", "internal/fakecuda", "internal/testdevice", "internal/page", testify, sys},
		true},
	{"internal/mounttest", []string{"client/go", "internal/fakecuda", "internal/page", "internal/model",
		"internal/testdevice", "internal/testdisk", "internal/testmount", porcupine, testify, rapid, sys}, true},
	{"internal/stress", []string{"client/go", "internal/page", "internal/testdevice", "internal/testdisk",
		"internal/testmount", testify, sys}, true},
}

// forTests are modules that every test may import in addition. Tests may also import any package of gaiafs to build
// what they need, except the tests of keepPure.
var forTests = []string{testify, rapid, goleak, "go.yaml.in/yaml/v3"}

// keepPure are folders whose tests must not do I/O either.
var keepPure = []string{"internal/page", "internal/choices", "internal/cost", "versions", "lrc", "prefetch",
	"pagecache/residency/policy", "pagecache/residency/tenants", "pagecache/residency/shortage", "pagecache/mover/schedule", "pagecache/view"}

// pure are the packages of gaiafs that such a test may import.
var pure = []string{"internal/page", "internal/choices", "internal/cost", "internal/model", "versions", "lrc",
	"prefetch"}

// pkg is the part of go list -json that the test uses.
type pkg struct {
	ImportPath   string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// list runs go list on the module for one operating system, and without cgo, as the binary is built.
func list(t *testing.T, tags string) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Standard,Imports,TestImports,XTestImports", "-tags="+tags,
		module+"/...")
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	cmd.Dir = root
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	require.NoError(t, err, errs.String())
	var all []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		all = append(all, p)
	}
}

// within reports whether path is prefix or lies in the folder of that name.
func within(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}

// allowed reports whether one of a rule's patterns matches.
func allowed(path string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		tree, isTree := strings.CutSuffix(p, "/...")
		return path == p || isTree && within(path, tree)
	})
}

func anyWithin(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return within(path, p) })
}

// ruleFor returns the rule with the longest folder.
func ruleFor(folder string) (best rule, ok bool) {
	for _, r := range rules {
		if within(folder, r.folder) && len(r.folder) >= len(best.folder) {
			best, ok = r, true
		}
	}
	return best, ok
}

// standard reports whether an import path belongs to the standard library: its first element has no dot.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// forbidden returns the imports that the rule for folder does not allow.
func forbidden(folder string, imports []string, test bool) []string {
	r, ok := ruleFor(folder)
	if !ok {
		return []string{"anything, because it has no rule in arrows_test.go"}
	}
	var wrong []string
	for _, path := range imports {
		own, ours := strings.CutPrefix(path, module+"/")
		switch {
		case standard(path):
			continue
		case !ours:
			own = path
		case within(own, r.folder) && (r.support || !forTestsOnly(own)):
			continue
		case test && !anyWithin(folder, keepPure), test && anyWithin(own, pure):
			continue
		}
		if allowed(own, r.imports) || test && !ours && (allowed(own, forTests) || allowed(own, []string{sys})) {
			continue
		}
		wrong = append(wrong, own)
	}
	return wrong
}

// forTestsOnly reports whether a package's rule has support set.
func forTestsOnly(path string) bool {
	r, ok := ruleFor(path)
	return ok && r.support
}

func TestImportsGoOneWay(t *testing.T) {
	for _, tags := range []string{"", "invariants"} {
		for _, p := range list(t, tags) {
			folder := strings.TrimPrefix(p.ImportPath, module+"/")
			if wrong := forbidden(folder, p.Imports, false); len(wrong) > 0 {
				t.Errorf("%s may not import this: %s", folder, strings.Join(wrong, ", "))
			}
			if wrong := forbidden(folder, append(p.TestImports, p.XTestImports...), true); len(wrong) > 0 {
				t.Errorf("tests of %s may not import this: %s", folder, strings.Join(wrong, ", "))
			}
		}
	}
}

// A test of the test: forbidden arrows that must be found, and some that are allowed.
func TestForbiddenArrowsAreFound(t *testing.T) {
	ours := func(folder string) []string { return []string{module + "/" + folder} }
	require.NotEmpty(t, forbidden("pagecache", ours("fs"), false))
	require.NotEmpty(t, forbidden("pagecache", ours("gpubackend/emulated"), false))
	require.NotEmpty(t, forbidden("pagecache/mover", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("pagecache/mover", ours("lrc"), false))
	require.NotEmpty(t, forbidden("pagecache/mover/schedule", ours("gpubackend"), true))
	require.NotEmpty(t, forbidden("pagecache/mover/schedule", ours("pagecache/mover"), false))
	require.NotEmpty(t, forbidden("pagecache/kernel", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("pagecache/home", ours("lrc"), false))
	require.NotEmpty(t, forbidden("pagecache/cleanread", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("pagecache/cleanread", ours("pagecache/residency"), false))
	require.NotEmpty(t, forbidden("pagecache/residency", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("pagecache/residency", ours("lrc"), false))
	require.NotEmpty(t, forbidden("pagecache/residency/policy", ours("gpubackend"), true))
	require.NotEmpty(t, forbidden("fs", ours("pagecache/residency"), false))
	require.Empty(t, forbidden("pagecache", ours("pagecache/residency"), false))
	require.NotEmpty(t, forbidden("lrc", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("lrc", ours("pagecache"), true))
	require.NotEmpty(t, forbidden("control", ours("fs"), false))
	require.NotEmpty(t, forbidden("control", []string{"github.com/hanwen/go-fuse/v2/fuse"}, false))
	require.NotEmpty(t, forbidden("client/go", ours("control"), false))
	require.NotEmpty(t, forbidden("versions", ours("lrc"), false))
	require.NotEmpty(t, forbidden("elsewhere", nil, false))
	require.NotEmpty(t, forbidden("bench", ours("pagecache"), false))
	require.NotEmpty(t, forbidden("gpubackend/emulated", ours("gpubackend/conformance"), false))
	require.Empty(t, forbidden("gpubackend/emulated", ours("gpubackend/conformance"), true))
	require.Empty(t, forbidden("cmd/gaiafs", ours("cmd/gaiafs/demo"), false))
	require.NotEmpty(t, forbidden("pagecache", []string{"github.com/stretchr/testify/require"}, false))
	require.Empty(t, forbidden("client/go", ours("control"), true))
	require.Empty(t, forbidden("fs", []string{"github.com/hanwen/go-fuse/v2/fuse", "os", "golang.org/x/sys/unix"},
		false))
	require.Empty(t, forbidden("gpubackend/emulated", ours("gpubackend"), false))
	require.Empty(t, forbidden("lrc", append(ours("internal/model"), "pgregory.net/rapid"), true))
}
