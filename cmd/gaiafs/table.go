package main

import (
	"cmp"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// print writes the status as text. It leaves out what is zero unless all is set.
func (s *statusDocument) print(w io.Writer, all bool) error {
	var b strings.Builder
	s.printMount(&b)
	s.printDevices(&b)
	s.printOwners(&b, all)
	s.printMoves(&b)
	b.WriteString("\nFiles on devices, or pinned on the host (pages of 4 KiB)\n")
	table(&b, func(t io.Writer) { s.files(t, all) })
	s.printLosses(&b)
	b.WriteString("\nHost memory: " + s.hostMemory(all) + "\n")
	if s.PinnedBytes+s.PinnedHotBytes > 0 || all {
		b.WriteString("Pinned memory: " + s.pinnedMemory() + "\n")
	}
	s.printPrograms(&b)
	s.printReads(&b, all)
	if ways := s.ways(all); ways != "" {
		b.WriteString("\nFilled so far: " + ways)
	}
	s.printCounters(&b, all)
	_, err := io.WriteString(w, b.String())
	return err
}

// printMount describes the mount, and whether it is ending.
func (s *statusDocument) printMount(b *strings.Builder) {
	m := s.Mount
	fmt.Fprintf(b, "%s at %s", pagecache.Printable(m.Source), pagecache.Printable(m.Mountpoint))
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
		fmt.Fprintf(b, ", passthrough refused %d times", m.PassthroughRefused)
	}
	fmt.Fprintf(b, "\ngaiafs %s, %s, since %s (%s)\n", m.Gaiafs, processText(m.PID),
		m.Started.Local().Format(time.DateTime), humanize.Time(m.Started))

	if len(m.Changed) > 0 {
		b.WriteString("changed since:")
		for i, name := range m.Changed {
			fmt.Fprintf(b, "%s %s=%s", strings.Repeat(",", min(i, 1)), name, m.Settings[name])
		}
		b.WriteString("\n")
	}
	if m.Detached {
		fmt.Fprintf(b, "detached: the mount is no longer at its mountpoint; %s wait to be written back%s. 'gaiafs "+
			"umount --force --pid %d' discards them\n",
			bytesText(s.waiting()), s.whyWaiting(), m.PID)
	}
	if m.Ending != "" {
		fmt.Fprintf(b, "ending: %s", m.Ending)
		if m.GivesUp != nil {
			fmt.Fprintf(b, "; discards what is not written back by %s", m.GivesUp.Local().Format(time.DateTime))
		}
		b.WriteString("\n")
	}
}

// printDevices lists the devices, and why their budgets have changed.
func (s *statusDocument) printDevices(b *strings.Builder) {
	b.WriteString("\nDevices\n")
	table(b, func(t io.Writer) {
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
	for _, d := range s.Devices {
		if d.MemoryWhy != "" {
			fmt.Fprintf(b, "  gpu%d memory: %s\n", d.Device, d.MemoryWhy)
		}
	}
}

// printOwners lists tenants and pins.
func (s *statusDocument) printOwners(b *strings.Builder, all bool) {
	section(b, "Tenants: the one furthest above its share gives way first", func(t io.Writer) (rows int) {
		fmt.Fprintf(t, "  \ttenant\towns\tshare\tmaximum\t\n")
		list := func(of string, accounts []pagecache.Account) {
			for _, a := range accounts {
				if len(accounts) == 1 && a.Most == 0 && !all {
					continue // a lone tenant without a limit may use everything
				}
				rows++
				most := "-"
				if a.Most > 0 {
					most = bytesText(a.Most)
				}
				fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t\n", of, a.Tenant, bytesText(a.Owned), bytesText(a.Share), most)
			}
		}
		for _, d := range s.Devices {
			list(fmt.Sprintf("gpu%d", d.Device), d.Tenants)
		}
		list("pinned memory", s.PinnedTenants)
		return rows
	})

	section(b, "Pinned files: what devices have of them stays", func(t io.Writer) (rows int) {
		for _, d := range s.Devices {
			for _, u := range d.Pins {
				rows++
				fmt.Fprintf(t, "  gpu%d\t%s\ton account of user %d\n", d.Device, bytesText(u.Bytes), u.User)
			}
		}
		return rows
	})
}

// printMoves lists why extents were evicted, and what brackets used in pinned memory.
func (s *statusDocument) printMoves(b *strings.Builder) {
	section(b, "Evicted, and why", func(t io.Writer) (rows int) {
		fmt.Fprintf(t, "  \tfrom\twhy\trule\tsize\textents\n")
		for _, d := range s.Devices {
			for _, e := range d.Evicted {
				rows++
				from := "device"
				if e.Pinned {
					from = "pinned memory"
				}
				fmt.Fprintf(t, "  gpu%d\t%s\t%s\t%s\t%s\t%d\n", d.Device, from, e.Why, cmp.Or(e.Rule, "-"),
					bytesText(e.Bytes), e.Extents)
			}
		}
		return rows
	})
	section(b, "Memory that brackets used in pinned memory, with too few accesses to move", func(t io.Writer) (rows int) {
		for _, d := range s.Devices {
			if o := d.Delayed; o.Brackets > 0 {
				rows++
				fmt.Fprintf(t, "  gpu%d\t%s\t%s\t%s\n", d.Device, count(int(o.Brackets), "bracket"),
					count(int(o.Extents), "extent"), bytesText(o.Bytes))
			}
		}
		return rows
	})
	section(b, "Brackets with pinned memory, which kernels reach over the bus", func(t io.Writer) (rows int) {
		for _, d := range s.Devices {
			if o := d.OverBus; o.Brackets > 0 {
				rows++
				fmt.Fprintf(t, "  gpu%d\t%s\t%s\t%.1f s\n", d.Device, count(int(o.Brackets), "bracket"),
					bytesText(o.Bytes), o.Seconds)
			}
		}
		return rows
	})
}

// printLosses lists the bytes that were lost with devices.
func (s *statusDocument) printLosses(b *strings.Builder) {
	if len(s.Losses) == 0 {
		return
	}
	b.WriteString("\nReleased bytes that were lost with devices (pages of 4 KiB)\n")
	table(b, func(t io.Writer) {
		fmt.Fprintf(t, "  file\tdevice\tpages\twhich\n")
		for _, l := range s.Losses {
			fmt.Fprintf(t, "  %s\tgpu%d\t%d\t%s\n", pagecache.Printable(l.File), l.Device, l.Pages, l.Where())
		}
	})
}

// printPrograms lists the programs with mappings.
func (s *statusDocument) printPrograms(b *strings.Builder) {
	section(b, "Programs with mappings", func(t io.Writer) (rows int) {
		for _, p := range s.Programs {
			rows++
			fmt.Fprintf(t, "  %s\t%s\tuser %d\t%s\t%s\n", cmp.Or(pagecache.Printable(p.Name), "?"), processText(p.Process),
				p.User, bytesText(p.Bytes), count(p.Mappings, "mapping"))
		}
		return rows
	})
}

// printReads lists the costs of reads by CPU programs.
func (s *statusDocument) printReads(b *strings.Builder, all bool) {
	section(b, "Reads on the CPU: moving averages", func(t io.Writer) (rows int) {
		fmt.Fprintf(t, "  \tlatency (µs)\tper second\treads\tunder way\t\n")
		line := func(name string, c pagecache.ReadCost) {
			state := ""
			if c.Stuck {
				state = "does not answer"
			}
			if c.Reads == 0 && !c.Stuck && !all {
				return
			}
			rows++
			latency, rate := "-", "-" // not measured
			if c.Reads > 0 {
				latency, rate = fmt.Sprintf("%.0f", c.LatencyMicros), bytesText(int64(c.Rate))
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\t%d\t%s\t%s\n", name, latency, rate, c.Reads, bytesText(c.QueuedBytes), state)
		}
		line("disk", s.Disk)
		for _, d := range s.Devices {
			line(fmt.Sprint("gpu", d.Device), d.Read)
		}
		return rows
	})
}

// printCounters lists counters and latencies.
func (s *statusDocument) printCounters(b *strings.Builder, all bool) {
	section(b, "Counters", func(t io.Writer) (rows int) {
		for _, name := range sortedKeys(s.Counters) {
			if s.Counters[name] != 0 || all {
				rows++
				fmt.Fprintf(t, "  %s\t%d\n", strings.ReplaceAll(name, "_", " "), s.Counters[name])
			}
		}
		return rows
	})

	section(b, "Latencies (µs)", func(t io.Writer) (rows int) {
		fmt.Fprintf(t, "  \tcount\tmean\tp50 below\tp99 below\tmax below\n")
		for _, name := range sortedKeys(s.Latencies) {
			l := s.Latencies[name]
			if l.Count == 0 && !all {
				continue
			}
			rows++
			fmt.Fprintf(t, "  %s\t%d\t%.0f\t%d\t%d\t%d\n", strings.ReplaceAll(name, "_", " "), l.Count, l.Mean, l.P50,
				l.P99, l.Max)
		}
		return rows
	})
}

// memoryClasses are the uses of host memory, in the order in which they are shown.
var memoryClasses = []struct{ name, what string }{{"bases", "base copies"},
	{"clean", "pages read ahead from devices"}, {"states", "page states"}, {"digests", "page hashes"},
	{"views", "lists of segments of views"}}

// hostMemory describes how host memory is used.
func (s *statusDocument) hostMemory(all bool) string {
	text := bytesText(s.Memory.UsedBytes) + " of " + bytesText(s.Memory.LimitBytes)
	separator := "; "
	for _, c := range memoryClasses {
		n := s.Memory.Classes[c.name]
		if n == 0 && !all {
			continue
		}
		text += separator + bytesText(n) + " for " + c.what
		if c.name == "clean" {
			text += fmt.Sprintf(" (%s at most)", bytesText(s.CleanLimit))
		}
		separator = ", "
	}
	return text
}

// pinnedMemory describes how the host's pinned memory is used.
func (s *statusDocument) pinnedMemory() string {
	text := fmt.Sprintf("%s of %s; %s for files that are pinned on the host, %s for extents, %s spare",
		bytesText(s.PinnedBytes), bytesText(s.PinnedLimit), bytesText(s.PinnedFileBytes),
		bytesText(s.PinnedBytes-s.PinnedFileBytes-s.PinnedSpareBytes), bytesText(s.PinnedSpareBytes))
	if s.PinnedHotBytes > 0 {
		text += fmt.Sprintf("; another %s for files that are loaded again and again", bytesText(s.PinnedHotBytes))
	}
	return text
}

// section writes a table with its heading, unless it has no rows.
func section(b *strings.Builder, heading string, fill func(io.Writer) (rows int)) {
	var text strings.Builder
	rows := 0
	table(&text, func(t io.Writer) { rows = fill(t) })
	if rows > 0 {
		b.WriteString("\n" + heading + "\n" + text.String())
	}
}

// ways says where the bytes on devices came from. It returns "" if there are none, unless all is set.
func (s *statusDocument) ways(all bool) string {
	var b strings.Builder
	var parts []string
	for _, way := range []struct{ counter, from string }{{"locked_pages", "where it is locked in memory"},
		{"cached_pages", "the host's page cache"},
		{"direct_pages", "the disk past the host's page cache"}, {"buffered_pages",
			"the disk through the host's page cache"}, {"peer_copy_pages", "other devices"}} {
		if n := s.Counters[way.counter]; n != 0 || all {
			parts = append(parts, bytesText(n<<page.Shift)+" from "+way.from)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	b.WriteString(strings.Join(parts, ", ") + "\n")
	if s.DirectReads == "off" {
		b.WriteString("  the disk is read through the page cache only (--direct-reads off)\n")
	}
	for _, reason := range s.Buffered {
		fmt.Fprintf(&b, "  some files are read through the page cache: %s\n", reason)
	}
	return b.String()
}

func (s *statusDocument) files(t io.Writer, all bool) {
	if len(s.Files) == 0 {
		fmt.Fprintf(t, "  none\n")
		return
	}
	fmt.Fprintf(t, "  file\tsize\tmappings\twhere\tresident\tstale\tdirty\tbases\toverlaps\n")
	idle, left := 0, 0
	for _, f := range s.Files {
		if !all && isIdle(f) {
			if idle == mostIdle {
				left++
				continue
			}
			idle++
		}
		var where []string
		for _, h := range f.Holders {
			where = append(where, fmt.Sprintf("gpu%d\t%d\t%d\t%d", h.Device, h.Resident, h.Stale, h.Dirty))
		}
		for _, v := range f.Views {
			where = append(where, fmt.Sprintf("gpu%d view\t%d\t%d\t0", v.Device, v.Resident, v.Stale))
		}
		if len(where) == 0 {
			where = []string{"-\t0\t0\t0"}
		}
		fmt.Fprintf(t, "  %s\t%s\t%d\t%s\t%d\t%s\n", pagecache.Printable(f.Name), bytesText(f.SizeBytes),
			mappingsOf(f), where[0], f.Bases, overlapText(f.Counters["overlapping_bytes"]))
		for _, w := range where[1:] {
			fmt.Fprintf(t, "  \t\t\t%s\t\t\n", w)
		}
		if f.BusySeconds > 0 {
			fmt.Fprintf(t, "    has not answered for %.1f s; this is its last known state\n", f.BusySeconds)
		}
		if f.Error != "" {
			fmt.Fprintf(t, "    %s wait to be written back: %s\n", bytesText(f.WaitingBytes), f.Error)
		}
	}
	if left > 0 {
		fmt.Fprintf(t, "  %s more that no program maps: --all lists all\n", count(left, "file"))
	}
}

// mostIdle is how many idle files the table has unless all are asked for.
const mostIdle = 50

// isIdle reports whether no program maps a file, and everything that devices have of it is home.
func isIdle(f pagecache.FileStatus) bool {
	return mappingsOf(f) == 0 && f.Error == "" && f.BusySeconds == 0 && f.WaitingBytes == 0
}

// viewText describes a view of a file.
func viewText(v pagecache.ViewStatus) string {
	text := fmt.Sprintf("on gpu%d: %s", v.Device, bytesText(v.Bytes))
	of, user := count(v.Segments, "segment"), fmt.Sprint("user ", v.User)
	if v.Files > 1 {
		of += fmt.Sprintf(" of %d files, %s of them of this one", v.Files, bytesText(v.FileBytes))
	}
	if v.User == stranger.User {
		user = "another user"
	} else {
		text += " in " + of
	}
	if _, stale := v.Held(); stale > 0 {
		text += ", " + bytesText(stale) + " stale"
	}
	return fmt.Sprintf("%s, for %s, %s; %s of device memory", text, user, count(v.Mappings, "mapping"),
		bytesText(v.DeviceBytes))
}

// count formats a number of things.
func count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprint(n, " ", thing)
}

// table aligns the columns that fill writes, without blanks at the ends of lines. Lines without columns stay as they
// are.
func table(w io.Writer, fill func(io.Writer)) {
	var text, rows strings.Builder
	fill(&text)
	t := tabwriter.NewWriter(&rows, 0, 0, 2, ' ', 0)
	for line := range strings.Lines(text.String()) { // to a tabwriter, a line without a tab is the end of all columns
		if strings.Contains(line, "\t") {
			_, _ = io.WriteString(t, line)
		}
	}
	_ = t.Flush() // into memory
	next, stop := iter.Pull(strings.Lines(rows.String()))
	defer stop()
	for line := range strings.Lines(text.String()) {
		if strings.Contains(line, "\t") {
			line, _ = next()
		}
		_, _ = io.WriteString(w, strings.TrimRight(line, " \n")+"\n") // commands check standard output at the end
	}
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
