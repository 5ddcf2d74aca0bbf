package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/fs"
)

// mostLog is how many bytes from the end of a log go into an archive.
const mostLog = 1 << 20

func newDebug() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "debug MOUNTPOINT -o FILE",
		Short: "Collect diagnostics for a bug report in one archive",
		Long: `debug writes an archive (tar, gzip) for a bug report: versions, the output of doctor, the status of the mount, the end of its
log, its command line, and the stacks and the heap of its daemon. It contains names of files and processes, but no contents of files.
errors.txt names what could not be collected. Only root and the user who mounted get everything.`,
		Example: `  gaiafs debug /mnt/data -o gaiafs-debug.tar.gz`,
		Args:    arguments("MOUNTPOINT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if output == "" {
				return usagef("name the file to write with -o")
			}
			if m, err := fs.MountOf(args[0]); err != nil || m.Type != fs.Type {
				return cmp.Or(err, fs.NotOurs(args[0]))
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
			defer stop()
			f, err := createFile(cmd, output, "an archive", false)
			if err != nil {
				return err
			}
			done := make(chan error, 1)
			go func() { done <- collect(ctx, cmd, args[0], f) }()
			select {
			case err = <-done:
			case <-ctx.Done(): // a daemon that does not answer would block it
				err = errors.New("interrupted")
			}
			return f.finish(err)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "",
		"`FILE` to write, which must not exist, or a pipe or device; - is standard output")
	return cmd
}

// collect writes the archive. If the daemon does not answer, the archive still has everything else.
func collect(ctx context.Context, cmd *cobra.Command, mountpoint string, w io.Writer) error {
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	var wrong strings.Builder
	now := time.Now()
	var failed error // the first error of a write; later ones say the same
	put := func(name string, content []byte, err error) {
		if err != nil {
			fmt.Fprintf(&wrong, "%s: %v\n", name, err)
			return
		}
		head := &tar.Header{Name: "gaiafs-debug/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: now}
		if failed == nil {
			failed = t.WriteHeader(head)
		}
		if failed == nil {
			_, failed = t.Write(content)
		}
	}
	status, statusErr := askStatus(mountpoint, patience)
	if statusErr != nil {
		statusErr = statusError(mountpoint, statusErr)
	}
	var s statusDocument
	if statusErr == nil {
		statusErr = json.Unmarshal(status, &s)
	}
	var versions bytes.Buffer
	err := printVersion(&versions)
	put("version.txt", versions.Bytes(), err)
	var doctor bytes.Buffer
	for _, look := range []func() []check{checkKernel, checkFUSE, checkLimits, checkMemory, checkContainer,
		checkMounts} {
		for _, c := range look() {
			c.print(&doctor)
		}
	}
	put("doctor.txt", doctor.Bytes(), nil)
	put("status.json", status, statusErr)
	if statusErr == nil {
		proc := fmt.Sprintf("/proc/%d", s.Mount.PID) // without one, errors.txt says so
		line, err := os.ReadFile(filepath.Join(proc, "cmdline"))
		put("command.txt", append(bytes.ReplaceAll(line, []byte{0}, []byte{' '}), '\n'), err)
		limits, err := os.ReadFile(filepath.Join(proc, "limits"))
		put("limits.txt", limits, err)
		log, err := logOf(proc)
		put("log.txt", log, err)
		for _, kind := range []struct{ word, file string }{{"stacks", "stacks.txt"}, {"heap", "heap.pprof"}} {
			doc, err := profile(ctx, mountpoint, kind.word, 0)
			put(kind.file, doc, err)
		}
	}
	if wrong.Len() > 0 {
		put("errors.txt", []byte(wrong.String()), nil)
		fmt.Fprint(cmd.ErrOrStderr(), "left out: "+strings.ReplaceAll(strings.TrimSpace(wrong.String()), "\n",
			"\nleft out: "), "\n")
	}
	return cmp.Or(failed, t.Close(), z.Close())
}

// logOf returns the end of a daemon's log: its standard error, if that is a file.
func logOf(proc string) ([]byte, error) {
	path := filepath.Join(proc, "fd", "2")
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		target, _ := os.Readlink(path)
		return nil, fmt.Errorf("the log goes to %s", target)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(max(st.Size()-mostLog, 0), io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, mostLog))
}
