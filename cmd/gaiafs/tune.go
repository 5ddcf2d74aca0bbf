package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache"
)

func newTune() *cobra.Command {
	var output string
	runs := 3
	cmd := &cobra.Command{
		Use:   "tune MOUNTPOINT -o FILE -- COMMAND…",
		Short: "Find out which files a program needs most in device memory",
		Long: `tune runs a program several times: first with all files on devices, then with one file after another in pinned memory of the
host. It measures the files that the program's brackets use (docs/moving.md). The more a file slows the program down per byte,
the higher is its priority. tune writes the priorities to a file for --priorities: files with lower priority are evicted first
when a device is full.

Before each run, tune evicts what nobody maps from the devices. Nothing else should use the mount at the same time. When tune ends,
it restores the mount's priorities. Only root and the user who mounted may do that.`,
		Example: `  gaiafs tune /mnt/data -o priorities.toml -- ./train --steps 10
  gaiafs set /mnt/data priorities=priorities.toml`,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
				return usagef("tune takes a MOUNTPOINT, and a COMMAND after --")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case output == "":
				return usagef("name the file to write with -o")
			case output == standardStream:
				return usagef("-o names a file: standard output belongs to the program")
			case runs < 1:
				return usagef("--runs %d: at least 1", runs)
			}
			f, err := createFile(cmd, output, "a file of priorities", true)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
			defer stop()
			t := tuning{mountpoint: args[0], runs: runs, out: cmd.OutOrStdout(), run: func(ctx context.Context) error {
				c := exec.CommandContext(ctx, args[1], args[2:]...)
				c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
				c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) } // it may have children to end
				c.WaitDelay = termPatience
				return c.Run()
			}}
			text, err := t.tune(ctx)
			if err == nil {
				_, err = io.WriteString(f, text)
			}
			return f.finish(err)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "`FILE` to write, which must not exist")
	cmd.Flags().IntVar(&runs, "runs", runs, "run the program `N` times for each file; tune uses the median")
	return cmd
}

// tuning holds the options of tune.
type tuning struct {
	mountpoint string
	runs       int
	out        io.Writer
	run        func(ctx context.Context) error // runs the program
}

// tuned is the result for one file.
type tuned struct {
	path     string
	bytes    int64
	took     time.Duration
	cost     float64 // seconds per GiB
	why      string  // why it was not measured; "" if it was
	priority int
}

// tune returns the text of a priorities file.
func (t *tuning) tune(ctx context.Context) (text string, err error) {
	status, err := statusOf(t.mountpoint, patience)
	if err != nil {
		return "", statusError(t.mountpoint, err)
	}
	path := cmp.Or(status.Mount.Settings["priorities"], noList)
	if path != noList {
		if err := readAgain(path); err != nil {
			return "", fmt.Errorf("tune could not restore the mount's priorities: %w", err)
		}
	}
	was := "priorities=" + path
	if _, err := set(ctx, t.mountpoint, []string{was}); err != nil { // tune could not restore them either
		return "", err
	}
	defer func() {
		_, e := set(context.WithoutCancel(ctx), t.mountpoint, []string{was})
		err = errors.Join(err, e)
	}()
	base, used, err := t.measure(ctx, "")
	if err != nil {
		return "", err
	}
	fmt.Fprintf(t.out, "as it is: %v\n", base.Round(time.Millisecond))
	if len(used) == 0 {
		return "", errors.New("the program began no brackets of files of this mount: there is nothing to tune")
	}
	for i := range used {
		f := &used[i]
		switch {
		case f.bytes > status.PinnedLimit:
			f.why = fmt.Sprintf("its %s are more than the pinned memory", bytesText(f.bytes))
		case strings.ContainsRune(f.path, utf8.RuneError):
			f.why = "its name is not UTF-8, which TOML requires"
		}
		if f.why != "" {
			fmt.Fprintf(t.out, "%s is not measured: %s\n", pagecache.Printable(f.path), f.why)
			continue
		}
		if f.took, _, err = t.measure(ctx, f.path); err != nil {
			return "", err
		}
		f.cost = max((f.took-base).Seconds(), 0) / (float64(f.bytes) / humanize.GiByte)
		fmt.Fprintf(t.out, "%s (%s) in pinned memory: %v, %.3f s for each GiB\n", pagecache.Printable(f.path),
			bytesText(f.bytes), f.took.Round(time.Millisecond), f.cost)
	}
	return priorities(used, base), nil
}

// noticeable is the relative slowdown from which on a file gets a priority.
const noticeable = 0.02

// termPatience is how long the program may take to end after a signal to tune.
const termPatience = 5 * time.Second

// priorities ranks the files by their costs and returns the text of the file. Files that were not measured get only a
// comment.
func priorities(used []tuned, base time.Duration) string {
	slices.SortFunc(used, func(a, b tuned) int {
		return cmp.Or(cmp.Compare(a.cost, b.cost), cmp.Compare(a.path, b.path))
	})
	var b strings.Builder
	fmt.Fprintf(&b, "# Made by gaiafs tune. Files with lower priority are evicted first. The program took %v.\n",
		base.Round(time.Millisecond))
	rank := 0
	for i := range used {
		f := &used[i]
		if f.why != "" {
			fmt.Fprintf(&b, "\n# %s is not measured: %s\n", pagecache.Printable(f.path), f.why)
			continue
		}
		if float64(f.took-base) > noticeable*float64(base) {
			rank++
			f.priority = rank
		}
		fmt.Fprintf(&b, "\n[[file]] # %s, %.3f s slower for each GiB\npath = %s\npriority = %d\n",
			bytesText(f.bytes), f.cost, quoteTOML(f.path), f.priority)
	}
	return b.String()
}

// quoteTOML returns s as a TOML basic string.
func quoteTOML(s string) string {
	quoted, _ := json.Marshal(s) // TOML has all escapes of JSON
	return string(quoted)
}

// measure runs the program t.runs times with one file in pinned memory, or none if onHost is "". It returns the median
// time, and the files that the program's brackets used.
func (t *tuning) measure(ctx context.Context, onHost string) (median time.Duration, used []tuned, err error) {
	value := "none"
	if onHost != "" {
		dir, err := os.MkdirTemp("", "gaiafs-tune")
		if err != nil {
			return 0, nil, err
		}
		defer os.RemoveAll(dir)
		value = filepath.Join(dir, "priorities.toml")
		text := fmt.Sprintf("[[file]]\npath = %s\nplace = \"host\"\n", quoteTOML(onHost))
		if err := os.WriteFile(value, []byte(text), 0o600); err != nil {
			return 0, nil, err
		}
	}
	if _, err := set(ctx, t.mountpoint, []string{"priorities=" + value}); err != nil {
		return 0, nil, err
	}
	var times []time.Duration
	for range t.runs {
		before, err := t.clear(ctx)
		if err != nil {
			return 0, nil, err
		}
		began := time.Now()
		if err := t.run(ctx); err != nil {
			return 0, nil, fmt.Errorf("the program failed: %w", err)
		}
		times = append(times, time.Since(began))
		if used, err = t.used(before); err != nil {
			return 0, nil, err
		}
	}
	slices.Sort(times)
	return times[len(times)/2], used, nil
}

// clear evicts from devices what nobody maps. It returns the number of brackets that have used each file.
func (t *tuning) clear(ctx context.Context) (brackets map[string]int64, err error) {
	status, err := statusOf(t.mountpoint, patience)
	if err != nil {
		return nil, err
	}
	for _, f := range status.Files {
		file, err := os.Open(filepath.Join(t.mountpoint, f.Name))
		if err != nil {
			continue // the file is gone or cannot be read
		}
		_, err = gaiafs.Evict(ctx, file, -1)
		file.Close()
		if err != nil {
			return nil, about(f.Name, "", err)
		}
	}
	// The daemon forgets a file with no bytes left on devices, including its counters. So ask again.
	if status, err = statusOf(t.mountpoint, patience); err != nil {
		return nil, err
	}
	brackets = make(map[string]int64)
	for _, f := range status.Files {
		brackets[f.Name] = f.Counters["brackets"]
	}
	return brackets, nil
}

// used returns the files that brackets have used since before.
func (t *tuning) used(before map[string]int64) (list []tuned, err error) {
	status, err := statusOf(t.mountpoint, patience)
	if err != nil {
		return nil, err
	}
	for _, f := range status.Files {
		if f.SizeBytes > 0 && f.Counters["brackets"] > before[f.Name] {
			list = append(list, tuned{path: f.Name, bytes: f.SizeBytes})
		}
	}
	return list, nil
}
