package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// liveTrace holds the options of trace --live.
type liveTrace struct {
	filter live.Filter
	asJSON bool
	length time.Duration
}

func (l *liveTrace) run(cmd *cobra.Command, mountpoint string) error {
	if _, err := askStatus(mountpoint, patience); err != nil {
		return statusError(mountpoint, err)
	}
	if l.filter.Path != "" {
		below, err := belowMount(mountpoint, l.filter.Path)
		if err != nil {
			return err
		}
		l.filter.Path = below
	}
	if err := l.filter.Check(); err != nil {
		return usageError{err}
	}
	for _, k := range l.filter.Kinds {
		if all := liveKinds(); !slices.Contains(all, k) {
			return usagef("there is no kind %q; there are %s", k, strings.Join(all, ", "))
		}
	}
	filter, err := json.Marshal(l.filter)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
	defer stop()
	if l.length > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.length)
		defer cancel()
	}
	out := beneath(cmd.OutOrStdout())
	if !l.asJSON {
		lines := &liveLines{w: bufio.NewWriter(out)}
		out = lines
	}
	err = gaiafs.Watch(ctx, mountpoint, filter, out)
	if errors.Is(err, syscall.EPIPE) { // the reader has gone
		return nil
	}
	return tooOld(err)
}

// liveKinds lists the kinds of events, sorted.
func liveKinds() []string {
	return slices.Sorted(slices.Values(append(append(fs.RequestKinds(), control.WatchedKinds()...), "transfer", "move")))
}

// belowMount returns a path relative to the mountpoint. path is absolute, or relative to the mountpoint, or names
// something on the mount from the working directory.
func belowMount(mountpoint, path string) (string, error) {
	mountpoint, err := filepath.Abs(mountpoint)
	if err != nil {
		return "", err
	}
	full, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	below, err := filepath.Rel(mountpoint, full)
	inside := err == nil && below != ".." && !strings.HasPrefix(below, "../")
	switch {
	case filepath.IsAbs(path) && !inside:
		return "", usagef("--path %s is not below %s", path, mountpoint)
	case filepath.IsAbs(path):
		return below, nil
	case inside:
		if _, err := os.Lstat(full); err == nil {
			return below, nil
		}
	}
	return path, nil
}

// liveLines prints one line of text for each event.
type liveLines struct {
	w    *bufio.Writer
	rest []byte // an incomplete document
}

// Write accepts any part of a stream of documents.
func (l *liveLines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	for {
		line, rest, whole := bytes.Cut(l.rest, []byte{'\n'})
		if !whole {
			break
		}
		l.rest = rest
		var e live.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return 0, fmt.Errorf("the daemon's answer cannot be read: %w", err)
		}
		fmt.Fprintln(l.w, liveLine(e))
	}
	return len(p), l.w.Flush()
}

// liveLine formats an event.
func liveLine(e live.Event) string {
	var b strings.Builder
	if e.Lost > 0 {
		fmt.Fprintf(&b, "… %d events are missing: they came too fast\n", e.Lost)
	}
	who := "-"
	if e.Process != 0 {
		who = fmt.Sprint(e.Process)
	}
	fmt.Fprintf(&b, "%s %9s %8s %-10s", e.At.Local().Format("15:04:05.000000"), microsText(e.Micros), who, e.Kind)
	for _, word := range []string{e.Device, e.Detail, e.File} {
		if word != "" {
			b.WriteString(" " + pagecache.Printable(word))
		}
	}
	if e.Files > 1 {
		b.WriteString(" and " + count(e.Files-1, "other file"))
	}
	switch {
	case e.Bytes > 0 && e.Kind != "transfer":
		fmt.Fprintf(&b, ": %s at %d", bytesText(e.Bytes), e.Offset)
	case e.Bytes > 0:
		b.WriteString(": " + bytesText(e.Bytes))
	}
	return b.String()
}

func microsText(us float64) string {
	if us < 1e4 {
		return fmt.Sprintf("%.0f µs", us)
	}
	return fmt.Sprintf("%.0f ms", us/1e3)
}
