package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVerdict(t *testing.T) {
	require.NoError(t, (&run{}).verdict())
	for _, r := range []Report{{MountDifferences: 1}, {BackingDifferences: 1}, {OverlappingBytes: 1}} {
		require.ErrorIs(t, (&run{report: r}).verdict(), ErrDiffers)
	}
}

func TestReportIsPrinted(t *testing.T) {
	var b strings.Builder
	r := Report{OutputBytes: 12288, SharedPages: 7, MergedPages: 5, Picture: "/x.png", Width: 4, Height: 3}
	r.CPU.Pages, r.Device.Pages, r.Device.Kind = 10, 11, "emulated"
	require.NoError(t, r.Print(&b))
	require.Regexp(t, `pages written +10 +11 +14`, b.String())
	require.Contains(t, b.String(), "All 12288 bytes equal those of a single-process run")
	r.BackingDifferences = 3
	b.Reset()
	require.NoError(t, r.Print(&b))
	require.Contains(t, b.String(), "0 read through the mount and 3 in the backing file differ")

	doc, err := json.Marshal(r)
	require.NoError(t, err)
	text, err := os.ReadFile("../../../docs/demo.md")
	require.NoError(t, err)
	var fields map[string]any
	require.NoError(t, json.Unmarshal(doc, &fields))
	for name := range fields {
		require.Contains(t, string(text), `"`+name+`"`, "docs/demo.md documents every field")
	}
}

func TestProgress(t *testing.T) {
	var b strings.Builder
	p := Lines(&b)
	p.Step("step %d", 1)
	for n := range 101 {
		p.Rows(n, 100, 100)
	}
	require.Equal(t, 5, strings.Count(b.String(), "\n"), "a line for the step and one for each quarter")
	b.Reset()
	p = Bars(&b)
	p.Rows(50, 100, 100)
	p.Step("next")
	require.Equal(t, "\r  left [###############---------------]  right [##############################]\nnext\n",
		b.String())
}

func TestWorkRefusesNonsense(t *testing.T) {
	for in, says := range map[string]string{"": "no job", "{\n": "cannot be read",
		`{"directory":"/does/not","output":"exist"}` + "\n": "no such file"} {
		require.ErrorContains(t, Work(strings.NewReader(in), &bytes.Buffer{}), says)
	}
}

// A program that maps a file outside any mount of gaiafs fails, and says so.
func TestDeviceProgramNeedsAMount(t *testing.T) {
	dir := t.TempDir()
	l := layout{w: 8, h: 8}
	require.NoError(t, os.WriteFile(filepath.Join(dir, outputName), make([]byte, l.size()), 0o600))
	j, err := json.Marshal(job{Program: rightProgram, Directory: dir, Output: outputName,
		Grid: grid{W: 8, H: 8, Side: 8}, Band: 1})
	require.NoError(t, err)
	require.ErrorContains(t, Work(bytes.NewReader(append(j, '\n')), &bytes.Buffer{}), "not on a gaiafs mount")
}

func TestProgramsThatFailAreReported(t *testing.T) {
	shell := func(script string) func(context.Context) *exec.Cmd {
		return func(ctx context.Context) *exec.Cmd { return exec.CommandContext(ctx, "sh", "-c", script) }
	}
	for script, says := range map[string]string{
		"echo 'gaiafs: no luck' >&2; exit 1": "the left program failed: no luck",
		"exit 1":                             "failed without a message",
		"read x; echo nonsense":              "failed without a message",
		`read x; echo '{"ready":true}'; read go; echo bad luck >&2; exit 3`:  "program failed: bad luck",
		`read x; echo '{"ready":true}'; read go; echo '{"done":{}}'; exit 3`: "failed without a message: exit status 3",
	} {
		_, err := both(context.Background(), shell(script), job{}, [2]int{}, func(program, int) {})
		require.ErrorContains(t, err, says, script)
	}
	works, err := both(context.Background(),
		shell(`read x; echo '{"ready":true}'; read go; echo '{"rows":2}'; echo '{"done":{"pages":3,"seconds":1}}'`),
		job{}, [2]int{}, func(_ program, rows int) { require.Equal(t, 2, rows) })
	require.NoError(t, err)
	require.Equal(t, [2]work{{3, 1}, {3, 1}}, works)
}

func TestRunPassesOnThatItCannotMount(t *testing.T) {
	pictures, err := Photos()
	require.NoError(t, err)
	no := errors.New("no mount today")
	o := Options{Pictures: pictures, Width: 64, Directory: t.TempDir(), Output: filepath.Join(t.TempDir(), "out.png"),
		Mount: func(context.Context, string, string) (func() error, error) { return nil, no }}
	_, err = Run(context.Background(), o)
	require.ErrorIs(t, err, no)
}
