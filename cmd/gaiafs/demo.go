package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/cmd/gaiafs/demo"
	"github.com/gaiafs/gaiafs/internal/rundir"
)

// runPrefix is how the names of the demo's folders begin.
const runPrefix = "gaiafs-demo-"

func newDemo() *cobra.Command {
	o := demoOptions{gpus: gpuChoice{"auto"}}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Let a CPU and a GPU program, or two GPUs, stitch one picture together",
		Long: `demo cuts photographs into overlapping tiles. Two processes stitch them at once into one file on a fresh mount: a CPU
program stores the left half of each row through an ordinary mmap, and a device program stores the right half through the
client library. With two devices or more, the first two take a half each. Both write to a common page in every row. The demo
compares every byte of the result with what a single process makes, and leaves the stitched picture. It fails if a byte
differs.`,
		Example: `  gaiafs demo
  gaiafs demo --gpus cuda:0,1
  gaiafs demo --input ~/Pictures --output mosaic.png
  gaiafs demo --json | jq .merged_pages`,
		Args:              arguments(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	cmd.Flags().StringVar(&o.input, "input", "", "use the JPEG and PNG pictures of the folder `DIR`")
	cmd.Flags().StringVar(&o.output, "output", "gaiafs-demo.png", "leave the stitched picture in `FILE`")
	cmd.Flags().Var(&o.gpus, "gpus", "devices of the programs: auto, or one or several of emulated[:N] and cuda[:0,1]")
	cmd.Flags().BoolVar(&o.keep, "keep", false, "keep the tiles and the output file, and print where they are")
	cmd.Flags().BoolVar(&o.json, "json", false, "print the result as JSON; docs/demo.md describes it")
	cmd.Flags().IntVar(&o.width, "width", demo.DefaultWidth, "width of the stitched picture in `PIXELS`")
	return cmd
}

type demoOptions struct {
	input, output string
	gpus          gpuChoice
	keep, json    bool
	width         int
}

func (o *demoOptions) run(cmd *cobra.Command) (err error) {
	switch {
	case o.gpus.none():
		return usagef("the demo needs a device: use --gpus emulated:1")
	case o.width < 64 || o.width > 16384:
		return usagef("--width %d: from 64 to 16384 pixels are possible", o.width)
	}
	pictures, err := o.pictures()
	if err != nil {
		return err
	}
	rundir.Sweep(os.TempDir(), runPrefix) // left by demos that were killed
	dir, err := rundir.Make(os.TempDir(), runPrefix)
	if err != nil {
		return fmt.Errorf("the demo's folder cannot be made: %w; set TMPDIR to a folder with free space", err)
	}
	defer func() {
		if o.keep {
			fmt.Fprintf(cmd.ErrOrStderr(), "Tiles, output file and log are kept in %s.\n", dir.Path)
			err = errors.Join(err, dir.Keep())
		} else if rerr := dir.Remove(); err == nil {
			err = rerr
		}
	}()
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	progress := demo.Lines(cmd.ErrOrStderr())
	if f, ok := cmd.ErrOrStderr().(*os.File); ok && canRewrite(f) {
		progress = demo.Bars(f)
	}
	report, err := demo.Run(ctx, demo.Options{
		Pictures:  pictures,
		Width:     o.width,
		Directory: dir.Path,
		Output:    o.output,
		Mount:     o.mount,
		Program:   program,
		Progress:  progress,
	})
	if ctx.Err() != nil && err != nil {
		return errors.New("interrupted: nothing is mounted, and no picture was made")
	}
	if report == nil {
		return err
	}
	out := cmd.OutOrStdout()
	if o.json {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return errors.Join(err, e.Encode(report))
	}
	fmt.Fprintln(out)
	return errors.Join(err, report.Print(out))
}

func (o *demoOptions) pictures() ([]demo.Picture, error) {
	if o.input == "" {
		return demo.Photos()
	}
	return demo.Folder(o.input)
}

// mount serves source at mountpoint in a separate process. It uses no settings but the demo's.
func (o *demoOptions) mount(ctx context.Context, source, mountpoint string) (func() error, error) {
	logPath := filepath.Join(filepath.Dir(source), "gaiafs.log")
	log, err := openLog(logPath)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd, _, err := startServing(ctx, endAfterMe, []string{"--config=/dev/null", "--gpus=" + o.gpus.String(), "--",
		source,
		mountpoint}, func(cmd *exec.Cmd) {
		cmd.Stderr = log
		cmd.Env = withoutSettings(os.Environ())
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C goes to the demo, which ends it
	})
	if err != nil {
		return nil, err
	}
	return func() error { return endMount(cmd, logPath) }, nil
}

// endMount ends the process that serves the demo's mount, and waits for it.
func endMount(cmd *exec.Cmd, logPath string) error {
	const patience = time.Minute
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Signal(syscall.SIGTERM) }) // a second signal forces
	defer late.Stop()
	if err := cmd.Wait(); err != nil {
		text := fmt.Sprintf("the mount ended with an error: %v", err)
		if words, rerr := os.ReadFile(logPath); rerr == nil {
			lines := strings.Split(strings.TrimSpace(string(words)), "\n")
			text += "; the end of its log: " + lines[len(lines)-1]
		}
		return errors.New(text)
	}
	return nil
}

// withoutSettings removes the settings of a mount from an environment.
func withoutSettings(environment []string) []string {
	own := map[string]bool{variable("config"): true}
	for _, name := range settingNames() {
		own[variable(name)] = true
	}
	var kept []string
	for _, e := range environment {
		if name, _, _ := strings.Cut(e, "="); !own[name] {
			kept = append(kept, e)
		}
	}
	return kept
}

// program returns the command that newProgram makes.
func program(ctx context.Context) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "demo-program")
	cmd.Args[0] = "gaiafs"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// newProgram makes the hidden command of the demo's two programs. Standard input says which of them to be.
func newProgram() *cobra.Command {
	return &cobra.Command{
		Use:    "demo-program",
		Hidden: true,
		Args:   arguments(),
		RunE:   func(cmd *cobra.Command, _ []string) error { return demo.Work(cmd.InOrStdin(), cmd.OutOrStdout()) },
	}
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
