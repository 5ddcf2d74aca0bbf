package plants

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var grow = flag.Bool("plants", false, "run the tests that must notice each fault; takes about half an hour")

// netTimeout ends a test that hangs because of a fault. That counts as noticed.
const netTimeout = "3m"

// plant is a fault.
type plant struct {
	name     string // what goes wrong
	file     string // relative to the module's root
	old, new string // old occurs exactly once in the file
	nets     []net
}

// net is a set of tests. At least one of them must fail.
type net struct {
	pkg  string // relative to the module's root
	run  string // -run
	args []string
}

func all() []plant {
	var list []plant
	for _, of := range [][]plant{lrcPlants, pagecachePlants, fsPlants, usersPlants, residencyPlants, viewsPlants,
		movesPlants, groupsPlants, controlPlants} {
		list = append(list, of...)
	}
	return list
}

// planted returns the altered file.
func (p plant) planted(t *testing.T) []byte {
	t.Helper()
	src, err := os.ReadFile(filepath.Join("../..", p.file))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(src), p.old), "%s: number of occurrences of:\n%s", p.file, p.old)
	return []byte(strings.Replace(string(src), p.old, p.new, 1))
}

// TestPlantsFit finds plants whose source text has changed.
func TestPlantsFit(t *testing.T) {
	names := make(map[string]bool)
	for _, p := range all() {
		t.Run(p.name, func(t *testing.T) {
			assert.False(t, names[p.name], "two plants have this name")
			names[p.name] = true
			assert.NotEmpty(t, p.nets)
			assert.NotEqual(t, p.old, p.new)
			_, err := format.Source(p.planted(t))
			assert.NoError(t, err)
		})
	}
	assert.GreaterOrEqual(t, len(names), 40)
}

// TestPlantsAreNoticed runs every net of every plant.
func TestPlantsAreNoticed(t *testing.T) {
	if !*grow {
		t.Skip("make test-plants runs it")
	}
	for _, p := range all() {
		t.Run(p.name, func(t *testing.T) {
			overlay := p.overlay(t)
			for _, n := range p.nets {
				t.Run(strings.ReplaceAll(n.pkg, "/", "."), func(t *testing.T) { n.mustFail(t, overlay) })
			}
		})
	}
}

// overlay returns the path of a file that tells the go command where the altered file is.
func (p plant) overlay(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	altered := filepath.Join(dir, filepath.Base(p.file))
	require.NoError(t, os.WriteFile(altered, p.planted(t), 0o600))
	original, err := filepath.Abs(filepath.Join("../..", p.file))
	require.NoError(t, err)
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{original: altered}})
	require.NoError(t, err)
	path := filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

// mustFail runs the tests of n on the altered source.
func (n net) mustFail(t *testing.T, overlay string) {
	t.Helper()
	args := append([]string{"test", "-json", "-vet=off", "-count=1", "-timeout=" + netTimeout, "-overlay=" + overlay,
		"-run=" + n.run, "./" + n.pkg}, n.args...)
	cmd := exec.Command("go", args...)
	cmd.Dir = "../.."
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	passed, failed, rest := results(out)
	switch {
	case len(failed) > 0:
		t.Logf("noticed by %s", strings.Join(failed, ", "))
	case strings.Contains(rest, "panic: ") || strings.Contains(rest, "fatal error: fault"):
		t.Log("noticed: the tests panicked, timed out, or used unmapped memory")
	case err == nil && passed == 0:
		t.Errorf("no test runs: go %s", strings.Join(args, " "))
	case err == nil:
		t.Errorf("not noticed: go %s", strings.Join(args, " "))
	default:
		t.Errorf("no test failed, but go %s: %v\n%s%s", strings.Join(args, " "), err, rest, errs.Bytes())
	}
}

// results parses the output of go test -json.
func results(out []byte) (passed int, failed []string, rest string) {
	var text strings.Builder
	decoder := json.NewDecoder(bytes.NewReader(out))
	for decoder.More() {
		var e struct{ Action, Test, Output string }
		if err := decoder.Decode(&e); err != nil {
			fmt.Fprintln(&text, err)
			break
		}
		switch {
		case e.Action == "pass" && e.Test != "":
			passed++
		case e.Action == "fail" && e.Test != "":
			failed = append(failed, e.Test)
		case e.Action == "output" || e.Action == "build-output":
			text.WriteString(e.Output)
		}
	}
	return passed, failed, text.String()
}
