package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/prefetch/replay"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

func newTrace() *cobra.Command {
	var l liveTrace
	var isLive bool
	cmd := &cobra.Command{
		Use:   "trace [--live MOUNTPOINT]",
		Short: "Show what a mount does as it happens, or record accesses and replay them with other policies",
		Long: `trace records what programs read through a mount. It replays a recording offline with each of the predictors of read-ahead, and
shows how many accesses would have found their bytes, how much would have been read needlessly, and how long it would have taken. It
also plays a recording with each of the rules that choose the extent to evict when a device is full.

With --live it shows what a mount does until it is interrupted: requests of the kernel (read, write, open …), of clients (map,
acquire, release …), and transfers to and from devices; how long each took, and which thread asked. It does not see reads that the
kernel answers itself. Root and the user who mounted see everything; other users see the requests of their own programs.
docs/trace.md describes --json.`,
		Example: `  gaiafs trace --live /mnt/data
  gaiafs trace --live /mnt/data --path models --kind read,map --json
  gaiafs trace record /mnt/data -o reads.trace --for 30s
  gaiafs trace replay reads.trace
  gaiafs trace evict reads.trace`,
		Args: func(cmd *cobra.Command, args []string) error {
			if isLive {
				return arguments("MOUNTPOINT")(cmd, args)
			}
			if len(args) > 0 && strings.Contains(args[0], "/") {
				return usagef("%s is no command: 'gaiafs trace --live %[1]s' shows what a mount does", args[0])
			}
			if len(args) > 0 {
				return noCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if isLive {
				return l.run(cmd, args[0])
			}
			return cmd.Help()
		},
	}
	cmd.Flags().BoolVar(&isLive, "live", false, "show what the mount does as it happens")
	cmd.Flags().StringVar(&l.filter.Path, "path", "",
		"only the file `PATH`, files below this directory, or files that match this pattern")
	cmd.Flags().Uint32Var(&l.filter.Process, "process", 0, "only requests of process `PID`")
	cmd.Flags().StringSliceVar(&l.filter.Kinds, "kind", nil, "only these `KINDS`: read, write, map, transfer …")
	cmd.Flags().BoolVar(&l.asJSON, "json", false, "print JSON, one document per line")
	cmd.Flags().DurationVar(&l.length, "for", 0, "stop after this `DURATION`; 0: when interrupted")
	cmd.AddCommand(newTraceRecord(), newTraceReplay(), newTraceEvict(), newTraceShow(), newTraceMake())
	return cmd
}

func newTraceRecord() *cobra.Command {
	var output string
	var length time.Duration
	cmd := &cobra.Command{
		Use:   "record MOUNTPOINT -o FILE",
		Short: "Record the accesses of a mount until interrupted",
		Long: `record writes down which bytes of which file are read, when, for how long, by which thread, and for which device, until it is
interrupted or the time of --for is over. It records reads of CPU programs as the daemon sees them: reads that the kernel's page
cache answers are missing. Only root and the user who mounted may record.`,
		Example: `  gaiafs trace record /mnt/data -o reads.trace --for 30s
  gaiafs trace record /mnt/data -o - --for 30s | gaiafs trace replay -`,
		Args: arguments("MOUNTPOINT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if output == "" {
				return usagef("name the file to write with -o")
			}
			if length < 0 {
				return usagef("--for %s is negative", length)
			}
			return recordTrace(cmd, args[0], output, length)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "",
		"`FILE` to write, which must not exist, or a pipe or device; - is standard output")
	cmd.Flags().DurationVar(&length, "for", 0, "stop after this `DURATION`; 0: when interrupted")
	return cmd
}

func recordTrace(cmd *cobra.Command, mountpoint, output string, length time.Duration) error {
	f, err := createTrace(cmd, output, 0o600)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	if length > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, length)
		defer cancel()
	}
	n := &counted{w: f}
	if _, err = askStatus(mountpoint, patience); err == nil { // gaiafs.Record waits for its daemon forever
		err = gaiafs.Record(ctx, mountpoint, n)
	}
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil {
		_, err = fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", f.name, bytesText(n.n))
		return err
	}
	if n.n > 0 {
		err = fmt.Errorf("%w; %s has the trace up to then; read it with --partial", err, f.name)
	} else if f.made {
		_ = os.Remove(output) // nothing was recorded
	}
	switch {
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EPERM):
		return err
	case n.n == 0:
		return statusError(mountpoint, err)
	}
	return err
}

// standardStream is the file name for standard input or output.
const standardStream = "-"

// traceFile is the output of a trace.
type traceFile struct {
	io.WriteCloser
	name string // for messages
	made bool   // it did not exist before
}

// createTrace creates the file of a trace, or uses standard output, which it does not close.
func createTrace(cmd *cobra.Command, output string, mode os.FileMode) (*traceFile, error) {
	return createOutput(cmd, output, "a trace", mode, false)
}

// createFile is createTrace for other output, which may be text.
func createFile(cmd *cobra.Command, output, what string, text bool) (*traceFile, error) {
	return createOutput(cmd, output, what, 0o600, text)
}

// finish closes the file. If it fails or err is set, it removes the file if this command made it.
func (f *traceFile) finish(err error) error {
	if err = errors.Join(err, f.Close()); err != nil && f.made {
		_ = os.Remove(f.name)
	}
	return err
}

func createOutput(cmd *cobra.Command, output, what string, mode os.FileMode, text bool) (*traceFile, error) {
	if output == standardStream {
		out := cmd.OutOrStdout()
		if f, ok := beneath(out).(*os.File); ok && isTerminal(f) && !text {
			return nil, usagef("%s cannot go to a terminal: write it to a pipe, or to a file with -o FILE", what)
		}
		return &traceFile{unclosed{out}, "standard output", false}, nil
	}
	f, err := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	made := err == nil
	if errors.Is(err, fs.ErrExist) {
		st, statErr := os.Stat(output)
		switch {
		case statErr == nil && st.IsDir():
			return nil, fmt.Errorf("%s is a directory: name a file in it that does not exist", output)
		case statErr != nil || st.Mode().IsRegular():
			return nil, fmt.Errorf("%s exists: remove it or choose another name", output)
		}
		f, err = os.OpenFile(output, os.O_WRONLY, 0) // a pipe, or a device such as /dev/null
	}
	if err != nil {
		return nil, fmt.Errorf("%s cannot be written: %w", what, err)
	}
	return &traceFile{f, output, made}, nil
}

// unclosed is a writer that its owner closes.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }

// counted counts the bytes that are written.
type counted struct {
	w io.Writer
	n int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// readTrace reads a trace file, or standard input. An incomplete trace is an error unless partial is set.
func readTrace(cmd *cobra.Command, path string, partial bool) (*trace.Trace, error) {
	from, errs := cmd.InOrStdin(), cmd.ErrOrStderr()
	if path == standardStream {
		path = "standard input"
		defer outliveWriter(from)()
	} else {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("the trace cannot be read: %w", err)
		}
		defer f.Close()
		from = f
	}
	t, err := trace.Read(from)
	switch {
	case err == nil:
		if t.Lost > 0 {
			_, err = fmt.Fprintf(errs, "gaiafs: %d accesses are missing: they came faster than they could be recorded\n",
				t.Lost)
		}
		return t, err
	case partial && t != nil:
		_, err = fmt.Fprintf(errs, "gaiafs: %s is %s; using the part before that\n", path, err)
		return t, err
	case t != nil:
		return nil, fmt.Errorf("%s is %w: use the part before that with --partial, or record it again", path, err)
	case errors.Is(err, trace.ErrVersion):
		return nil, fmt.Errorf("%s is %w: record it again, or use the gaiafs that recorded it", path, err)
	case errors.Is(err, trace.ErrFormat):
		return nil, fmt.Errorf("%s is %w: 'gaiafs trace record' and 'gaiafs trace make' write them", path, err)
	}
	return nil, fmt.Errorf("%s cannot be read: %w", path, err)
}

// outliveWriter ignores SIGINT until restore is called, if from is a pipe. Ctrl-C is meant for the process at the other
// end of the pipe, which may still have to write the end of a trace.
func outliveWriter(from io.Reader) (restore func()) {
	f, ok := from.(*os.File)
	if !ok {
		return func() {}
	}
	if st, err := f.Stat(); err != nil || st.Mode()&fs.ModeNamedPipe == 0 {
		return func() {}
	}
	unread := make(chan os.Signal, 1) // signal.Reset would not undo signal.Ignore
	signal.Notify(unread, syscall.SIGINT)
	return func() { signal.Stop(unread) }
}

func newTraceMake() *cobra.Command {
	var output string
	length := size(1 << 30)
	var seed uint64
	cmd := &cobra.Command{
		Use:     "make PATTERN -o FILE",
		Short:   "Make the trace of an access pattern",
		Args:    arguments("PATTERN"),
		Example: "  gaiafs trace make out-of-order -o o.trace --size 4G\n  gaiafs trace replay o.trace",
		RunE: func(cmd *cobra.Command, args []string) error {
			if output == "" {
				return usagef("name the file to write with -o")
			}
			t, err := replay.Make(args[0], int64(length), seed)
			if err != nil {
				return usageError{err}
			}
			f, err := createTrace(cmd, output, 0o644)
			if err != nil {
				return err
			}
			_, err = f.Write(trace.Encode(t))
			return f.finish(err)
		},
		ValidArgs: replay.Patterns(),
	}
	cmd.Long = "make writes the trace of programs that read one file as the pattern says:\n\n" +
		nameList(replay.Patterns(), replay.AboutPattern)
	cmd.Flags().StringVarP(&output, "output", "o", "",
		"`FILE` to write, which must not exist, or a pipe or device; - is standard output")
	cmd.Flags().Var(&length, "size", "size of the file that is read")
	cmd.Flags().Uint64Var(&seed, "seed", 1, "seed `N` of the random numbers")
	return cmd
}
