package main

import (
	"encoding/json"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/cmd/gaiafs/demo"
)

func TestCommandDemo(t *testing.T) {
	dir := t.TempDir()
	picture := filepath.Join(dir, "stitched.png")
	cmd := command(t, "demo", "--gpus=emulated:1", "--width=1400", "--json", "--keep", "--output", picture)
	// the demo ignores the user's settings
	cmd.Env = append(cmd.Env, "TMPDIR="+dir, variable("read-only")+"=true")
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	var report demo.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Zero(t, report.MountDifferences+report.BackingDifferences+report.OverlappingBytes)
	require.Len(t, report.Pictures, 4)
	require.Equal(t, 1400, report.Width)
	require.GreaterOrEqual(t, report.SharedPages, int64(report.Height), "every row shares a page")
	require.Equal(t, report.CPU.ExpectedPages, report.CPU.Pages)
	require.Equal(t, report.Device.ExpectedPages, report.Device.Pages, "releases found every page that was stored into")
	require.Equal(t, picture, report.Picture)
	f, err := os.Open(picture)
	require.NoError(t, err)
	defer f.Close()
	c, err := png.DecodeConfig(f)
	require.NoError(t, err)
	require.Equal(t, report.Width, c.Width)
	require.Equal(t, report.Height, c.Height)
	kept, err := filepath.Glob(filepath.Join(dir, "gaiafs-demo-*", "source", "stitched.raw"))
	require.NoError(t, err)
	require.Len(t, kept, 1)
	require.Contains(t, r.err, "stitching once more in a single process")
}

// With two devices, both halves are written in device memory.
func TestCommandDemoOnTwoDevices(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, "demo", "--gpus=emulated:2", "--width=700", "--json", "--output", filepath.Join(dir, "out.png"))
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	var report demo.Report
	require.NoError(t, json.Unmarshal([]byte(r.out), &report))
	require.Equal(t, "gpu0 program", report.CPU.Program)
	require.Equal(t, "gpu1 program", report.Device.Program)
	require.Equal(t, "emulated", report.CPU.Kind)
	require.Zero(t, report.MountDifferences+report.BackingDifferences+report.OverlappingBytes)
	require.Equal(t, report.CPU.ExpectedPages, report.CPU.Pages, "releases found every page that was stored into")
	require.Equal(t, report.Device.ExpectedPages, report.Device.Pages)
}

func TestCommandDemoWithOwnPictures(t *testing.T) {
	dir := t.TempDir()
	r := gaiafsCommand(t, "demo", "--input", dir)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "has no file that ends with .jpg, .jpeg or .png")

	photo, err := os.ReadFile("demo/photos/chelsea.png")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mine.png"), photo, 0o600))
	cmd := command(t, "demo", "--input", dir, "--width=300", "--output", filepath.Join(dir, "out.png"))
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	r = execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	for _, row := range []string{"pages written", "pages shared", "pages merged", "overlapping bytes", "seconds",
		"equal those of a single-process run"} {
		require.Contains(t, r.out, row)
	}
	left, err := filepath.Glob(filepath.Join(dir, "gaiafs-demo-*"))
	require.NoError(t, err)
	require.Empty(t, left, "the working folder is gone")
}

func TestCommandDemoCannotLeaveItsPicture(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, "demo", "--width=64", "--output", filepath.Join(dir, "missing", "out.png"))
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	r := execute(t, cmd)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "the picture cannot be written")
	require.Contains(t, r.err, "choose another file with --output")
	require.NotContains(t, r.err, "laying", "the error comes before any work")

	r = gaiafsCommand(t, "demo", "--width=64", "--output", dir)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, dir+" is a folder: choose another file with --output")
	require.NotContains(t, r.err, "laying")
}

// The demo checks its devices before it lays out the pictures.
func TestCommandDemoWithoutItsGPU(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, "demo", "--width=64", "--gpus=cuda:254", "--output", filepath.Join(dir, "out.png"))
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	r := execute(t, cmd)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "--gpus cuda:254: the devices cannot be opened")
	require.NotContains(t, r.err, "laying")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestCommandDemoIsInterrupted(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, "demo", "--output", filepath.Join(dir, "out.png"))
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	errs, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := make([]byte, 0, 4096)
	for !strings.Contains(string(said), "stitching and sharpening") {
		n, err := errs.Read(said[len(said):cap(said)])
		require.NoError(t, err, "%s", said)
		said = said[:len(said)+n]
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	rest, err := io.ReadAll(errs)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Contains(t, string(rest), "gaiafs: interrupted: nothing is mounted, and no picture was made\n")
	require.Equal(t, exitFailure, cmd.ProcessState.ExitCode())
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Empty(t, left, "no folder, no mount and no picture stay")
}
