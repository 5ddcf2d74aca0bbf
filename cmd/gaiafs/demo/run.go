package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// outputName is the output file's name on the mount.
const outputName = "stitched.raw"

// temporaryPicture is the pattern of the name of an incomplete picture.
const temporaryPicture = ".gaiafs-demo-*.png"

// defaultBand is the number of rows that a device program releases at a time.
const defaultBand = 64

// ErrDiffers says that the output differs from what a single process makes of the same tiles. That is a bug of gaiafs.
var ErrDiffers = errors.New("the result is wrong")

// Options says how to run the demo. Pictures, Directory, Output, Mount and Program are required.
type Options struct {
	Pictures []Picture
	// Width is that of the slide in pixels; 0 means DefaultWidth.
	Width int
	// Directory is where the folders source and mountpoint are made. Run does not remove it.
	Directory string
	// Output is the path of the stitched PNG.
	Output string
	// Mount shows source at an empty mountpoint, in a separate process. unmount returns when that process has ended.
	Mount func(ctx context.Context, source, mountpoint string) (unmount func() error, err error)
	// Program returns a command that runs Work and ends with ctx.
	Program func(ctx context.Context) *exec.Cmd
	// Progress follows the run; nil if nobody does.
	Progress Progress
}

// Progress follows a run. Its methods are not called concurrently.
type Progress interface {
	// Step describes the step that begins in a sentence.
	Step(format string, args ...any)
	// Rows says how many of the rows each half has stored.
	Rows(left, right, of int)
}

type silent struct{}

func (silent) Step(string, ...any) {}
func (silent) Rows(_, _, _ int)    {}

// Run runs the demo. It blocks for some seconds; ctx ends it early. The Report is complete if the error is nil or
// ErrDiffers.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Width == 0 {
		o.Width = DefaultWidth
	}
	if o.Progress == nil {
		o.Progress = silent{}
	}
	begin := time.Now()
	r := &run{Options: o, source: filepath.Join(o.Directory, "source"),
		mountpoint: filepath.Join(o.Directory, "mountpoint")}
	if err := r.prepare(); err != nil {
		return nil, err
	}
	if err := r.onMount(ctx); err != nil {
		return nil, err
	}
	backing, err := os.ReadFile(filepath.Join(r.source, outputName))
	if err != nil {
		return nil, fmt.Errorf("the backing file is gone after the unmount: %w", err)
	}
	r.report.BackingDifferences = differences(backing, r.want)
	if err := r.writePicture(backing); err != nil {
		return nil, err
	}
	r.report.Seconds = time.Since(begin).Seconds()
	return &r.report, r.verdict()
}

// run is the state of Run.
type run struct {
	Options
	source, mountpoint string
	slide              *raster
	grid               grid
	layout             layout
	want               []byte // the output file of a single process
	report             Report
	devices            [2]int // the devices of the programs
}

// prepare makes the folders, and checks that the picture can be written.
func (r *run) prepare() error {
	if err := r.checkOutput(); err != nil {
		return err
	}
	for _, dir := range []string{r.source, r.mountpoint} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("the demo's folder cannot be made: %w", err)
		}
	}
	return nil
}

// checkOutput tries in the folder of the picture what writePicture does there.
func (r *run) checkOutput() error {
	path, err := filepath.Abs(r.Output)
	if err != nil {
		return err
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return fmt.Errorf("the picture cannot be written: %s is a folder: choose another file with --output", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), temporaryPicture)
	if err != nil {
		return fmt.Errorf("the picture cannot be written: %w; choose another file with --output", err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// lay makes the slide.
func (r *run) lay() error {
	r.Progress.Step("laying %d pictures out on a slide", len(r.Pictures))
	var err error
	r.slide, err = drawSlide(r.Pictures, r.Width, func(p *Picture) {
		r.report.Pictures = append(r.report.Pictures, PictureReport{p.Name, p.W, p.H})
	})
	if err != nil {
		return err
	}
	r.grid = grid{W: r.slide.w, H: r.slide.h, Side: tileSide, Overlap: tileOverlap}
	r.layout = layout{w: r.slide.w, h: r.slide.h}
	r.report.Version = ReportVersion
	r.report.Width, r.report.Height = r.slide.w, r.slide.h
	r.report.Tiles = len(r.grid.tiles())
	r.report.OutputBytes = r.layout.size()
	for y := range r.layout.h {
		written, shared := r.layout.pages(rightProgram, y)
		r.report.Device.ExpectedPages += written
		r.report.SharedPages += shared
		written, _ = r.layout.pages(leftProgram, y)
		r.report.CPU.ExpectedPages += written
	}
	return nil
}

// onMount does the rest. It mounts first, so that a device that does not exist is reported at once.
func (r *run) onMount(ctx context.Context) (err error) {
	r.Progress.Step("mounting %s at %s", r.source, r.mountpoint)
	unmount, err := r.Mount(ctx, r.source, r.mountpoint)
	if err != nil {
		return err
	}
	defer func() {
		r.Progress.Step("unmounting, and checking the backing file")
		if uerr := unmount(); err == nil {
			err = uerr
		}
	}()
	if err := r.chooseDevices(); err != nil {
		return err
	}
	if err := r.lay(); err != nil {
		return err
	}
	r.Progress.Step("cutting the slide into %d tiles that overlap by %d pixels, as files on the mount", r.report.Tiles,
		tileOverlap)
	if err := cut(r.slide, r.grid, r.mountpoint); err != nil {
		return err
	}
	output, err := r.createOutput()
	if err != nil {
		return err
	}
	defer func() {
		if cerr := output.Close(); err == nil {
			err = cerr
		}
	}()
	if err := r.stitch(ctx); err != nil {
		return err
	}
	if err := output.Sync(); err != nil { // collects what was released
		return fmt.Errorf("fsync of the output: %w", err)
	}
	if err := r.readCounters(); err != nil {
		return err
	}
	r.Progress.Step("stitching once more in a single process, and comparing every byte")
	if r.want, err = r.plainRun(); err != nil {
		return err
	}
	got, err := os.ReadFile(output.Name())
	if err != nil {
		return fmt.Errorf("the output cannot be read through the mount: %w", err)
	}
	r.report.MountDifferences = differences(got, r.want)
	return ctx.Err()
}

// createOutput makes the output file: its header, and zeros.
func (r *run) createOutput() (*os.File, error) {
	f, err := os.Create(filepath.Join(r.mountpoint, outputName))
	if err != nil {
		return nil, fmt.Errorf("the output file cannot be made: %w", err)
	}
	if err = f.Truncate(r.layout.size()); err == nil {
		_, err = f.Write(r.layout.header())
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("the output file cannot be made: %w", err)
	}
	return f, nil
}

// stitch runs the two programs.
func (r *run) stitch(ctx context.Context) error {
	r.Progress.Step("stitching and sharpening %d × %d pixels: %s (left) and %s (right) at once", r.layout.w, r.layout.h,
		r.report.CPU.Program, r.report.Device.Program)
	var mu sync.Mutex
	var rows [2]int
	begin := time.Now()
	works, err := both(ctx, r.Program, job{Directory: r.mountpoint, Output: outputName, Grid: r.grid,
		Band: defaultBand}, r.devices,
		func(p program, n int) {
			mu.Lock()
			defer mu.Unlock()
			rows[p] = n
			r.Progress.Rows(rows[leftProgram], rows[rightProgram], r.layout.h)
		})
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if err != nil {
		return err
	}
	r.report.StitchSeconds = time.Since(begin).Seconds()
	r.report.CPU.work, r.report.Device.work = works[leftProgram], works[rightProgram]
	return nil
}

// status is the part of the mount's status that the demo uses.
type status struct {
	Devices []struct {
		Number int    `json:"device"`
		Kind   string `json:"kind"`
		Name   string `json:"name"`
	} `json:"devices"`
	Counters map[string]int64 `json:"counters"`
}

func (r *run) status() (s status, err error) {
	doc, err := gaiafs.Status(r.mountpoint)
	if err == nil {
		if err = json.Unmarshal(doc, &s); err != nil {
			err = fmt.Errorf("the mount's status cannot be read: %w", err)
		}
	}
	return s, err
}

// chooseDevices gives the halves to the mount's first two devices, or to the CPU and the only device. The programs have
// the daemon's environment, so CUDA numbers GPUs in the same way for them.
func (r *run) chooseDevices() error {
	s, err := r.status()
	if err != nil {
		return err
	}
	if len(s.Devices) == 0 {
		return errors.New("the mount has no device for the demo: use --gpus emulated:1")
	}
	reports := [2]*ProgramReport{&r.report.CPU, &r.report.Device}
	r.devices[leftProgram], r.report.CPU.Program = noDevice, "CPU program"
	for p := range reports {
		d := p - (2 - min(len(s.Devices), 2))
		if d < 0 {
			continue
		}
		r.devices[p] = s.Devices[d].Number
		reports[p].Program = fmt.Sprintf("gpu%d program", s.Devices[d].Number)
		reports[p].Kind, reports[p].Name = s.Devices[d].Kind, s.Devices[d].Name
	}
	return nil
}

// readCounters reads the mount's counters.
func (r *run) readCounters() error {
	s, err := r.status()
	if err != nil {
		return err
	}
	r.report.MergedPages = s.Counters["merged_pages"]
	r.report.OverlappingBytes = s.Counters["overlapping_bytes"]
	return nil
}

// plainRun stitches the tiles of the backing directory in this process, in plain memory.
func (r *run) plainRun() ([]byte, error) {
	files := make(map[string][]byte)
	for _, t := range r.grid.tiles() {
		file, err := os.ReadFile(filepath.Join(r.source, t.name()))
		if err != nil {
			return nil, fmt.Errorf("a tile is gone from the backing directory: %w", err)
		}
		files[t.name()] = file
	}
	return r.layout.reference(r.grid, files)
}

// writePicture writes the PNG. It replaces an old one only by a complete one.
func (r *run) writePicture(file []byte) error {
	if int64(len(file)) < r.layout.size() {
		return fmt.Errorf("%w: the backing file has %d bytes instead of %d", ErrDiffers, len(file),
			r.layout.size())
	}
	path, err := filepath.Abs(r.Output)
	if err != nil {
		return err
	}
	r.Progress.Step("writing %s", path)
	f, err := os.CreateTemp(filepath.Dir(path), temporaryPicture)
	if err != nil {
		return fmt.Errorf("the picture cannot be written: %w", err)
	}
	defer os.Remove(f.Name())
	err = r.layout.encode(f, file)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("the picture cannot be written: %w", err)
	}
	r.report.Picture = path
	return nil
}

func (r *run) verdict() error {
	p := &r.report
	switch {
	case p.MountDifferences > 0 || p.BackingDifferences > 0:
		return fmt.Errorf("%w: %d bytes read through the mount and %d bytes of the backing file differ from a single-process run",
			ErrDiffers, p.MountDifferences, p.BackingDifferences)
	case p.OverlappingBytes > 0:
		return fmt.Errorf("%w: %d bytes were counted as written by both programs, which have no byte in common",
			ErrDiffers, p.OverlappingBytes)
	}
	return nil
}

// differences counts the bytes that differ. Bytes that only one of them has count as different.
func differences(got, want []byte) int64 {
	n := int64(max(len(got), len(want)) - min(len(got), len(want)))
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			n++
		}
	}
	return n
}
