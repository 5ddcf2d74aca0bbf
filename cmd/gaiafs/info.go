package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

func newInfo() *cobra.Command {
	var asJSON, recursive bool
	cmd := &cobra.Command{
		Use:   "info PATH…",
		Short: "Show where a file is: what devices hold of it, and who maps it",
		Long: `info shows what each device holds of a file: current is what an acquire would find up to date, stale lacks something that was
released since, absent is not there. A view has some of the file's bytes in a layout of its own, as load_safetensors makes it.
Memory is counted once, however many programs map it. Several files are also summed up. Files that the user may not read are named
and left out, and the exit code is 1. Root and the user who mounted see all mappings; other
users see only their own programs' mappings. --json prints a document for scripts, which docs/status.md describes.`,
		Example: `  gaiafs info /mnt/data/model.safetensors
  gaiafs info --recursive /mnt/data/models | tail -n 3
  gaiafs info --json /mnt/data/*.bin | jq '.[].holders'`,
		Args: somePaths,
		RunE: func(cmd *cobra.Command, args []string) error {
			found, failed, err := findReadable(cmd, args, recursive)
			if err != nil {
				return err
			}
			all := []fileInfo{}
			for _, f := range found.files {
				in, err := inspect(cmd.Context(), f)
				if err != nil {
					return err
				}
				all = append(all, in)
			}
			if asJSON {
				return cmp.Or(printJSON(cmd, all), failed)
			}
			var b strings.Builder
			for i, in := range all {
				if i > 0 {
					b.WriteString("\n")
				}
				in.print(&b)
			}
			if len(all) > 1 {
				b.WriteString("\n")
				printSum(&b, all)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), b.String())
			return cmp.Or(err, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "include the files below directories")
	return cmd
}

// fileInfo is what `gaiafs info` shows of a file.
type fileInfo struct {
	Path string `json:"path"`
	pagecache.Inspection
	Residency []residencyInfo `json:"residency"`
	// MemoryBytes is the device memory that the file and its views take, counted once.
	MemoryBytes int64 `json:"memory_bytes"`
}

// residencyInfo is what a device holds, in bytes of the file: as it is, or in a view.
type residencyInfo struct {
	Device  int   `json:"device"`
	Current int64 `json:"current_bytes"`
	Stale   int64 `json:"stale_bytes"`
	Absent  int64 `json:"absent_bytes"`
}

// inspect asks the daemon about a file.
func inspect(ctx context.Context, f target) (fileInfo, error) { return inspectWithin(ctx, f, patience) }

// inspectWithin is inspect with a limit. If the backing filesystem does not answer, the open waits, too.
func inspectWithin(ctx context.Context, f target, limit time.Duration) (fileInfo, error) {
	in, err := within(f.path, limit, func() (in pagecache.Inspection, err error) {
		file, err := f.open()
		if err != nil {
			return in, err
		}
		defer file.Close()
		return decode[pagecache.Inspection](gaiafs.Inspect(ctx, file))
	})
	if errors.Is(err, errNoAnswer) {
		return fileInfo{}, fmt.Errorf("%s: no answer after %s: its backing filesystem may not answer; 'gaiafs status' "+
			"says which files wait", f.name(), limit)
	}
	if err != nil {
		return fileInfo{}, about(f.name(), "", err)
	}
	return newFileInfo(f, in), nil
}

func newFileInfo(f target, in pagecache.Inspection) fileInfo {
	info := fileInfo{Path: f.path, Inspection: in, Residency: []residencyInfo{}}
	info.SizeBytes = max(in.SizeBytes, f.size)
	for _, h := range in.Holders {
		info.MemoryBytes += h.Memory
		info.hold(h.Device, bytesOf(h.Resident-h.Stale, info.SizeBytes), bytesOf(h.Stale, info.SizeBytes))
	}
	for _, v := range in.Views {
		info.MemoryBytes += v.DeviceBytes
		clean, stale := v.Held()
		info.hold(v.Device, min(clean, info.SizeBytes), min(stale, info.SizeBytes))
	}
	return info
}

// hold notes that a device holds so much of the file. If a device has several holdings or views of the file, the
// fullest is shown: users who must not share memory have one each.
func (i *fileInfo) hold(device int, current, stale int64) {
	n := slices.IndexFunc(i.Residency, func(r residencyInfo) bool { return r.Device == device })
	if n < 0 {
		i.Residency = append(i.Residency, residencyInfo{Device: device})
		n = len(i.Residency) - 1
	}
	r := &i.Residency[n]
	if current >= r.Current {
		r.Current, r.Stale = current, stale
	}
	r.Absent = max(i.SizeBytes-r.Current-r.Stale, 0)
}

// bytesOf returns how many bytes of a file these pages have. The last page may be partial.
func bytesOf(pages, size int64) int64 { return min(pages<<page.Shift, size) }

func (i *fileInfo) print(b *strings.Builder) {
	fmt.Fprintf(b, "%s\n", pagecache.Printable(i.Path))
	table(b, func(t io.Writer) {
		line := func(what, format string, args ...any) {
			fmt.Fprintf(t, "  %s\t%s\n", what, fmt.Sprintf(format, args...))
		}
		line("size", "%s", bytesText(i.SizeBytes))
		if len(i.Residency) == 0 {
			line("devices", "none has any of it")
		}
		for _, r := range i.Residency {
			line(fmt.Sprintf("gpu%d", r.Device), "%s", r)
		}
		if i.Pinned != "" {
			line("pinned", "on %s, on account of user %d", pinnedText(i.Pinned), i.PinnedBy)
		}
		locked := fmt.Sprintf("%s of %s in the host's memory", bytesText(i.LockedBytes), bytesText(i.SizeBytes))
		if p, err := pagecache.ParsePinning(i.Pinned); err == nil && p.Host {
			line("locked", "%s", locked)
		} else if i.LockedBytes > 0 {
			line("locked", "%s, because the file is loaded again and again", locked)
		}
		if i.LockError != "" {
			line("not locked", "%s", pagecache.Printable(i.LockError))
		}
		for _, v := range i.Views {
			line("view", "%s", viewText(v))
		}
		if i.MemoryBytes > 0 {
			line("memory", "%s of devices, counted once", bytesText(i.MemoryBytes))
		}
		for _, w := range i.MappedBy {
			line("mapped by", "%s", windowText(w))
		}
		if i.Others > 0 {
			line("mapped by", "%s of other users", count(i.Others, "mapping"))
		}
		overlapping, merged := i.Counters["overlapping_bytes"], i.Counters["merged_pages"]
		switch {
		case overlapping > 0:
			line("conflicts", "%d bytes were stored by two writers without synchronising; %s merged", overlapping,
				count(int(merged), "page"))
		case merged > 0:
			line("conflicts", "none; %s merged", count(int(merged), "page"))
		}
		if past := i.Counters["past_end_pages"]; past > 0 {
			line("past end", "releases found stores past the end of the file in %s: they are not kept; make the file "+
				"as long as the mapping", count(int(past), "page"))
		}
		if i.Error != "" {
			line("waiting", "%s to be written back: %s", bytesText(i.WaitingBytes), i.Error)
		}
		if i.BusySeconds > 0 {
			line("busy", "has not answered for %.1f s; this is its last known state", i.BusySeconds)
		}
	})
}

// printSum prints the size of several files, and what devices hold of them in mappings.
func printSum(b *strings.Builder, files []fileInfo) {
	var size int64
	held := make(map[int]*residencyInfo)
	for _, f := range files {
		size += f.SizeBytes
		for _, r := range f.Residency {
			if held[r.Device] == nil {
				held[r.Device] = &residencyInfo{Device: r.Device}
			}
			held[r.Device].Current += r.Current
			held[r.Device].Stale += r.Stale
		}
	}
	fmt.Fprintf(b, "%s\n", count(len(files), "file"))
	table(b, func(t io.Writer) {
		fmt.Fprintf(t, "  size\t%s\n", bytesText(size))
		for _, device := range slices.Sorted(maps.Keys(held)) {
			r := held[device]
			r.Absent = size - r.Current - r.Stale
			fmt.Fprintf(t, "  gpu%d\t%s\n", device, r)
		}
	})
}

func (r residencyInfo) String() string {
	text := bytesText(r.Current) + " current"
	if r.Stale > 0 {
		text += ", " + bytesText(r.Stale) + " stale"
	}
	if r.Absent > 0 {
		text += ", " + bytesText(r.Absent) + " absent"
	}
	return text
}

func windowText(w pagecache.MappingInfo) string {
	name := processText(w.Process)
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", w.Process)); err == nil {
		name = pagecache.Printable(strings.TrimSuffix(string(comm), "\n")) + ", " + name
	}
	access := "to read"
	if w.Writable {
		access = "to write"
	}
	if w.Lazy {
		access += ", lazily"
	}
	what := fmt.Sprintf("%s at %d", bytesText(w.Bytes), w.Offset)
	if w.View {
		what = "a view of " + bytesText(w.Bytes)
	}
	return fmt.Sprintf("%s of user %d: %s on gpu%d, %s", name, w.User, what, w.Device, access)
}
