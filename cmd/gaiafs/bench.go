package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/bench"
)

func newBench() *cobra.Command {
	o := benchOptions{gpus: gpuChoice{"auto"}}
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Compare a mount with the bare filesystem and with go-fuse's loopback, on this machine",
		Long: fmt.Sprintf(`bench measures gaiafs on this machine and its disks: fio through a mount, through go-fuse's loopback and on the bare
filesystem, cold, from the host's memory and from a device's; CPU reads of a file that is partly on a device; names and trees of
small files; git and a Go build; the cost of many devices; mapping, acquire and release. Each round measures every side of a row once.
The table shows medians, quartiles, the median of the ratios within the rounds, and whether the row meets its target.

It makes its own files in --dir, and removes them and its mounts at the end, also after Ctrl-C; results measured by then are kept. With
--file it reads your file instead and never writes to it. With --model it compares with safetensors how long a model takes to load and
to compute with; this needs Python with gaiafs and safetensors. Some rows need fio, git or go, and cold names need root. --list
lists the groups of rows. --quick finishes in %.0f minutes. docs/bench.md describes the rows and the JSON.`,
			bench.QuickTime.Round(time.Minute).Minutes()),
		Example: `  gaiafs bench --quick --html report.html
  gaiafs bench --run '^fio/.*cold' --rounds 3 --json cold.json
  gaiafs bench --file /data/model.safetensors --gpus cuda:0
  gaiafs bench --model /data/model.safetensors --html model.html
  gaiafs bench --run '^cached/' --dir /mnt/nvme --html cached.html`,
		Args:              arguments(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.Quick, "quick", false, "smaller files and, unless --run names others, only the rows that users ask for first: under two minutes")
	f.StringVar(&o.pattern, "run", "", "only the rows whose GROUP/NAME matches `REGEX`")
	f.IntVar(&o.Rounds, "rounds", 0, "measure each side `N` times (default 5, or 3 with --quick)")
	f.StringVar(&o.Dir, "dir", os.TempDir(),
		"measure in the folder `DIR`, which needs free space (default: the folder for temporary files)")
	f.Lookup("dir").DefValue = "" // so that the help text is the same on every machine
	f.StringVar(&o.File, "file", "", "read the file `PATH` instead of files of bench's own")
	f.StringVar(&o.Model, "model", "",
		"compare with safetensors how the model in the safetensors file `PATH` loads and runs")
	f.StringVar(&o.Python, "python", "python3", "the Python `PROGRAM` for --model")
	f.Var(&o.gpus, "gpus", "devices of the mounts: auto, none, or several of emulated[:N] and cuda[:0,1]; auto uses two emulated "+
		"devices if there is no GPU")
	f.StringVar(&o.JSON, "json", "", "write everything measured to `FILE`")
	f.StringVar(&o.HTML, "html", "", "write a self-contained report with plots to `FILE`")
	f.StringVar(&o.Markdown, "markdown", "", "write the tables in Markdown to `FILE`")
	f.BoolVar(&o.list, "list", false, "list the groups of rows and exit")
	if err := errors.Join(cmd.MarkFlagDirname("dir"), cmd.MarkFlagFilename("file"),
		cmd.MarkFlagFilename("model", "safetensors"),
		cmd.MarkFlagFilename("json", "json"),
		cmd.MarkFlagFilename("html", "html"), cmd.MarkFlagFilename("markdown", "md")); err != nil {
		panic(err) // a flag name is wrong
	}
	return cmd
}

type benchOptions struct {
	bench.Options
	gpus    gpuChoice
	pattern string
	list    bool
}

func (o *benchOptions) run(cmd *cobra.Command) error {
	if o.list {
		return bench.List(cmd.OutOrStdout())
	}
	match, err := regexp.Compile(o.pattern)
	if err != nil {
		return usagef("--run: %w", err)
	}
	if cmd.Flags().Changed("rounds") && o.Rounds < 1 { // 0 means the default only if the flag is absent
		return usagef("--rounds %d: each side must be measured at least once", o.Rounds)
	}
	if o.Model != "" && o.File != "" {
		return usagef("--file and --model cannot be used together: --model reads its file")
	}
	for _, path := range []*string{&o.Dir, &o.File, &o.Model} {
		if *path != "" {
			if *path, err = filepath.Abs(*path); err != nil {
				return err
			}
		}
	}
	o.Out, o.Progress = beneath(cmd.OutOrStdout()), cmd.ErrOrStderr()
	if err := o.CheckReports(); errors.Is(err, bench.ErrOverwrites) {
		return usagef("%w", err)
	} else if err != nil {
		return fmt.Errorf("the report cannot be written: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	signal.Ignore(syscall.SIGPIPE) // it cleans up even if the reader of the table has gone
	o.Match, o.GPUs = match, benchDevices(o.gpus)
	o.Command, o.Version = shown(os.Args[1:]), version
	o.Mount, o.Process = benchMount, benchProcess
	err = bench.Run(ctx, o.Options)
	if errors.Is(err, bench.ErrNoMatch) {
		return usageError{err}
	}
	return err
}

// shown quotes a command line so that a shell reads it back unchanged.
func shown(args []string) string {
	plain := regexp.MustCompile(`^[\w./:=,@%+-]+$`)
	words := []string{"gaiafs"}
	for _, a := range args {
		if !plain.MatchString(a) {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}

// benchDevices returns the value of --gpus for the mounts. Without a GPU it asks for two emulated devices, so that one
// can read what the other wrote.
func benchDevices(g gpuChoice) string {
	if g.auto() {
		if _, err := foundCUDA(slog.New(slog.DiscardHandler)); err != nil {
			return "emulated:2"
		}
	}
	return g.String()
}

// benchMount is bench.Options.Mount.
func benchMount(flags []string, source, mountpoint string, prepare func(*exec.Cmd)) (*exec.Cmd, error) {
	arguments := append([]string{"--config=/dev/null"}, flags...)
	cmd, _, err := startServing(context.Background(), endAfterMe, append(arguments, "--", source, mountpoint),
		func(cmd *exec.Cmd) {
			cmd.Env = withoutSettings(os.Environ())
			prepare(cmd)
		})
	return cmd, err
}

// benchProcess returns the command that newBenchProcess makes.
func benchProcess(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{"bench-process", "--"}, args...)...)
	cmd.Args[0] = "gaiafs"
	return cmd
}

// newBenchProcess makes the hidden command that bench runs in processes of its own. The arguments say what to do.
func newBenchProcess() *cobra.Command {
	return &cobra.Command{
		Use:    "bench-process",
		Hidden: true,
		RunE:   func(cmd *cobra.Command, args []string) error { return bench.Process(args, cmd.OutOrStdout()) },
	}
}
