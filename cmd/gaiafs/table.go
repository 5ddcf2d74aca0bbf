package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// print writes the status for people.
func (s *statusDocument) print(w io.Writer) error {
	var b strings.Builder
	m := s.Mount
	fmt.Fprintf(&b, "%s at %s", m.Source, m.Mountpoint)
	if m.ReadOnly {
		b.WriteString(", read-only")
	}
	if m.WriteBack {
		b.WriteString(", write-back")
	}
	if m.Passthrough {
		b.WriteString(", passthrough")
	}
	if m.PassthroughRefused > 0 {
		fmt.Fprintf(&b, ", passthrough refused %d times", m.PassthroughRefused)
	}
	fmt.Fprintf(&b, "\ngaiafs %s, process %d, since %s (%s)\n", m.Gaiafs, m.PID,
		m.Started.Local().Format(time.DateTime), humanize.Time(m.Started))

	if m.Detached {
		fmt.Fprintf(&b, "detached: the mount is not at its place any more; %s wait to be written back%s. 'gaiafs "+
			"umount --force --pid %d' gives them up\n",
			bytesText(s.waiting()), s.whyWaiting(), m.PID)
	}
	if m.Ending != "" {
		fmt.Fprintf(&b, "ending: %s", m.Ending)
		if m.GivesUp != nil {
			fmt.Fprintf(&b, "; gives up what cannot be written back at %s", m.GivesUp.Local().Format(time.DateTime))
		}
		b.WriteString("\n")
	}

	b.WriteString("\nDevices\n")
	table(&b, func(t io.Writer) {
		if len(s.Devices) == 0 {
			fmt.Fprintf(t, "  none\n")
			return
		}
		fmt.Fprintf(t, "  \tkind\tmemory\tused\tmapped\textents\tUUID\t\n")
		for _, d := range s.Devices {
			state := ""
			if d.Lost {
				state = "lost"
			}
			fmt.Fprintf(t, "  gpu%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", d.Device, d.Kind, bytesText(d.MemoryBytes),
				bytesText(d.UsedBytes),
				bytesText(d.MappedBytes), d.Extents, cmp.Or(d.UUID, "-"), state)
		}
	})

	b.WriteString("\nFiles on devices (pages of 4 KiB)\n")
	table(&b, s.files)

	if len(s.Losses) > 0 {
		b.WriteString("\nReleased bytes that were lost with devices (pages of 4 KiB)\n")
		table(&b, func(t io.Writer) {
			fmt.Fprintf(t, "  file\tdevice\tpages\twhich\n")
			for _, l := range s.Losses {
				fmt.Fprintf(t, "  %s\tgpu%d\t%d\t%s\n", l.File, l.Device, l.Pages, l.Where())
			}
		})
	}

	used := s.Memory.Classes
	fmt.Fprintf(&b, "\nHost memory: %s of %s; %s for base copies, %s (%s at most) for pages read ahead from devices, "+
		"%s for page states, %s for page hashes\n",
		bytesText(s.Memory.UsedBytes), bytesText(s.Memory.LimitBytes), bytesText(used["bases"]), bytesText(used["clean"]), bytesText(s.CleanLimit),
		bytesText(used["states"]), bytesText(used["digests"]))

	b.WriteString("\nReads on the CPU: moving averages\n")
	table(&b, func(t io.Writer) {
		fmt.Fprintf(t, "  \tlatency (µs)\tper second\treads\tunder way\t\n")
		line := func(name string, c pagecache.ReadCost) {
			state := ""
			if c.Stuck {
				state = "does not answer"
			}
			fmt.Fprintf(t, "  %s\t%.0f\t%s\t%d\t%s\t%s\n", name, c.LatencyMicros, bytesText(int64(c.Bandwidth)),
				c.Reads, bytesText(c.QueuedBytes), state)
		}
		line("disk", s.Disk)
		for _, d := range s.Devices {
			line(fmt.Sprint("gpu", d.Device), d.Read)
		}
	})

	b.WriteString("\nFilled so far: " + s.ways())

	b.WriteString("\nCounters\n")
	table(&b, func(t io.Writer) {
		for _, name := range sortedKeys(s.Counters) {
			fmt.Fprintf(t, "  %s\t%d\n", strings.ReplaceAll(name, "_", " "), s.Counters[name])
		}
	})

	b.WriteString("\nLatencies (µs)\n")
	table(&b, func(t io.Writer) {
		fmt.Fprintf(t, "  \tcount\tmean\tp50 below\tp99 below\tmax below\n")
		for _, name := range sortedKeys(s.Latencies) {
			l := s.Latencies[name]
			fmt.Fprintf(t, "  %s\t%d\t%.0f\t%d\t%d\t%d\n", strings.ReplaceAll(name, "_", " "), l.Count, l.Mean, l.P50,
				l.P99, l.Max)
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}

// ways says where the bytes on devices came from.
func (s *statusDocument) ways() string {
	var b strings.Builder
	of := func(counter string) string { return bytesText(s.Counters[counter] << page.Shift) }
	fmt.Fprintf(&b, "%s from the host's page cache, %s from the disk past it, %s from the disk through it, %s from "+
		"other devices\n",
		of("cached_pages"), of("direct_pages"), of("buffered_pages"), of("peer_copy_pages"))
	if s.DirectReads == "off" {
		b.WriteString("  the disk is read through the page cache only (--direct-reads off)\n")
	}
	for _, reason := range s.Buffered {
		fmt.Fprintf(&b, "  some file is read through the page cache: %s\n", reason)
	}
	return b.String()
}

func (s *statusDocument) files(t io.Writer) {
	if len(s.Files) == 0 {
		fmt.Fprintf(t, "  none\n")
		return
	}
	fmt.Fprintf(t, "  file\tsize\tmappings\twhere\tresident\tstale\tdirty\tbases\toverlaps\n")
	for _, f := range s.Files {
		holders := f.Holders
		if len(holders) == 0 {
			holders = []pagecache.HoldingStatus{{Device: -1}}
		}
		for i, h := range holders {
			where := "-"
			if h.Device >= 0 {
				where = fmt.Sprintf("gpu%d", h.Device)
			}
			if i > 0 {
				fmt.Fprintf(t, "  \t\t\t%s\t%d\t%d\t%d\t\t\n", where, h.Resident, h.Stale, h.Dirty)
				continue
			}
			fmt.Fprintf(t, "  %s\t%s\t%d\t%s\t%d\t%d\t%d\t%d\t%s\n", f.Name, bytesText(f.SizeBytes), f.Mappings, where,
				h.Resident, h.Stale,
				h.Dirty, f.Bases, overlapText(f.Counters["overlapping_bytes"]))
		}
		for _, v := range f.Views {
			fmt.Fprintf(t, "    %s\n", viewText(v))
		}
		if f.BusySeconds > 0 {
			fmt.Fprintf(t, "    has not answered for %.1f s; this is what was seen last\n", f.BusySeconds)
		}
		if f.Error != "" {
			fmt.Fprintf(t, "    %s wait to be written back: %s\n", bytesText(f.WaitingBytes), f.Error)
		}
	}
}

// viewText describes a view of a file.
func viewText(v pagecache.ViewStatus) string {
	of := count(v.Segments, "segment")
	if v.Files > 1 {
		of += fmt.Sprintf(" of %d files", v.Files)
	}
	return fmt.Sprintf("view on gpu%d: %s in %s, for user %d, %s; %s of device memory", v.Device, bytesText(v.Bytes), of,
		v.User, count(v.Mappings, "mapping"), bytesText(v.DeviceBytes))
}

// count is a number of things, for people.
func count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprint(n, " ", thing)
}

func table(w io.Writer, fill func(io.Writer)) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fill(t)
	_ = t.Flush() // into memory
}

func bytesText(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

func overlapText(n int64) string { return fmt.Sprintf("%d B", n) }

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
