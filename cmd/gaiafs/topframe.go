package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/mattn/go-runewidth"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// topFrame draws the changes between two samples, in at most width columns and height lines. chosen is the inode number
// of the file whose map is shown.
func topFrame(before, now topSample, chosen uint64, width, height int) string {
	others := max(now.Mount.Clients-1, 0) // without this program
	counts := fmt.Sprintf("  %s  %s", count(others, "client"), count(now.Mount.Mappings, "mapping"))
	lines := []string{"gaiafs " + cut(now.Mount.Mountpoint, width-len("gaiafs ")-len(counts)) + counts}
	lines = append(lines, topMemory(before, now)...)
	lines = append(lines, topReads(before, now), "")
	files := topFiles(before, now)
	row := fileRow(files, chosen)
	var chosenMap []string
	if row < len(files) {
		chosenMap = heatMap(files[row])
	}
	room := height - len(lines) - len(chosenMap) - 2 // for files and programs, less a heading and a blank line
	programs := topPrograms(before, now, min(room/3, height/5))
	room = max(room-len(programs), 1)
	lines = append(lines, fmt.Sprintf("  %-40s %10s %10s %8s", "file", "size", "on devices", "mappings"))
	first := max(row-room+1, 0)
	for i := first; i < min(len(files), first+room); i++ {
		mark := " "
		if i == row {
			mark = ">"
		}
		f := files[i]
		lines = append(lines, fmt.Sprintf("%s %s %10s %10s %8d", mark, cell(f.Name, 40), bytesText(f.SizeBytes),
			bytesText(held(f)), mappingsOf(f)))
	}
	if len(files) == 0 {
		lines = append(lines, "  devices hold nothing")
	}
	lines = append(append(append(lines, ""), chosenMap...), programs...)
	var b strings.Builder
	for _, l := range lines[:min(len(lines), height)] {
		b.WriteString(strings.TrimRight(cut(l, width), " ") + "\n")
	}
	return b.String()
}

// topFiles returns the files, the busiest first.
func topFiles(before, now topSample) []pagecache.FileStatus {
	files := slices.Clone(now.Files)
	slices.SortStableFunc(files, func(a, b pagecache.FileStatus) int {
		return cmp.Or(cmp.Compare(moved(before, b), moved(before, a)), cmp.Compare(held(b), held(a)))
	})
	return files
}

// fileRow returns the row of the file with an inode number. It returns 0 if there is none: nothing was chosen, or the
// file has left the devices.
func fileRow(files []pagecache.FileStatus, inode uint64) int {
	return max(slices.IndexFunc(files, func(f pagecache.FileStatus) bool { return f.Inode == inode }), 0)
}

// perSecond returns the growth per second between two samples, or "-" if there is none.
func perSecond(before, now topSample, was, is int64) string {
	seconds := now.at.Sub(before.at).Seconds()
	if seconds <= 0 || is <= was {
		return "-"
	}
	return bytesText(int64(float64(is-was) / seconds))
}

// topMemory shows for each device what its memory holds, its pinned memory of the host, and what moves in and out.
func topMemory(before, now topSample) []string {
	row := func(of, used string, cells ...any) string {
		return fmt.Sprintf("%-6s %8s", of, used) + fmt.Sprintf(strings.Repeat("%9s", len(cells)), cells...)
	}
	lines := []string{row("", "used", "of", "clean", "dirty", "stale", "pinned", "in/s", "out/s")}
	for i, d := range now.Devices {
		clean, dirty, stale := held3(now.Files, d.Device)
		in, out := "-", "-"
		if i < len(before.Devices) {
			b := before.Devices[i]
			in = perSecond(before, now, movedBy(b, "in", "peer"), movedBy(d, "in", "peer"))
			out = perSecond(before, now, movedBy(b, "out"), movedBy(d, "out"))
		}
		lines = append(lines, row(fmt.Sprint("gpu", d.Device), bytesText(d.UsedBytes), bytesText(d.MemoryBytes),
			clean, dirty, stale, bytesText(d.PinnedBytes), in, out))
	}
	if now.PinnedLimit > 0 {
		lines = append(lines, row("pinned", bytesText(now.PinnedBytes), bytesText(now.PinnedLimit)))
	}
	return lines
}

// topReads shows where reads of CPU programs come from.
func topReads(before, now topSample) string {
	reads := "reads  "
	for _, way := range []struct{ counter, name string }{{"host_read_bytes", "host"},
		{"clean_read_bytes", "read ahead"},
		{"device_read_bytes", "devices"}, {"disk_read_bytes", "disk"}} {
		rate := perSecond(before, now, before.Counters[way.counter], now.Counters[way.counter])
		if rate != "-" {
			rate += "/s"
		}
		reads += fmt.Sprintf("%s %s  ", way.name, rate)
	}
	return reads
}

// topPrograms lists at most most lines of programs, the busiest first, below a blank line and a heading.
func topPrograms(before, now topSample, most int) []string {
	const above = 2
	if most <= above || len(now.Programs) == 0 {
		return nil
	}
	asked := make(map[uint32]int64)
	for _, p := range before.Programs {
		asked[p.Process] += p.Requests
	}
	recent := func(p control.Program) int64 { return max(p.Requests-asked[p.Process], 0) }
	all := slices.Clone(now.Programs)
	slices.SortStableFunc(all, func(a, b control.Program) int {
		return cmp.Or(cmp.Compare(recent(b), recent(a)), cmp.Compare(b.Bytes, a.Bytes))
	})
	lines := []string{"", fmt.Sprintf("  %-40s %10s %10s %8s", "program", "process", "user", "maps")}
	for _, p := range all[:min(len(all), most-above)] {
		lines = append(lines, fmt.Sprintf("  %s %10d %10d %8s", cell(cmp.Or(p.Name, "?"), 40), p.Process, p.User,
			bytesText(p.Bytes)))
	}
	return lines
}

// heatMap returns a line for each device that holds a part of a file, and for each view with bytes of the file.
func heatMap(f pagecache.FileStatus) (lines []string) {
	for _, h := range f.Holders {
		lines = append(lines, fmt.Sprintf("%-10s %s", fmt.Sprint("gpu", h.Device), h.Map))
	}
	for _, v := range f.Views {
		lines = append(lines, fmt.Sprintf("%-10s %s", fmt.Sprintf("gpu%d view", v.Device), v.Map))
	}
	return lines
}

// moved counts the bytes of a file that were read on the CPU, brought to devices or brought home since a sample.
func moved(before topSample, f pagecache.FileStatus) int64 {
	sum := func(c map[string]int64) int64 {
		return c["host_read_bytes"] + c["clean_read_bytes"] + c["device_read_bytes"] + c["disk_read_bytes"] +
			(c["filled_pages"]+c["refreshed_pages"]+c["collected_pages"])<<page.Shift
	}
	i := slices.IndexFunc(before.Files, func(b pagecache.FileStatus) bool { return b.Inode == f.Inode })
	if i < 0 {
		return sum(f.Counters)
	}
	return sum(f.Counters) - sum(before.Files[i].Counters)
}

// held counts the bytes of a file on devices, in views too.
func held(f pagecache.FileStatus) (bytes int64) {
	for _, h := range f.Holders {
		bytes += h.Resident << page.Shift
	}
	for _, v := range f.Views {
		clean, stale := v.Held()
		bytes += clean + stale
	}
	return bytes
}

// mappingsOf counts the mappings of a file and of its views.
func mappingsOf(f pagecache.FileStatus) int {
	n := f.Mappings
	for _, v := range f.Views {
		n += v.Mappings
	}
	return n
}

// held3 returns how much of all files a device holds, in views too.
func held3(files []pagecache.FileStatus, device int) (clean, dirty, stale string) {
	var c, d, s int64
	for _, f := range files {
		for _, h := range f.Holders {
			if h.Device == device {
				c, d, s = c+h.Clean<<page.Shift, d+h.Dirty<<page.Shift, s+h.Stale<<page.Shift
			}
		}
		for _, v := range f.Views {
			if clean, stale := v.Held(); v.Device == device {
				c, s = c+clean, s+stale
			}
		}
	}
	return bytesText(c), bytesText(d), bytesText(s)
}

// movedBy counts the bytes that were moved to or from a device in these ways.
func movedBy(d pagecache.DeviceStatus, ways ...string) (bytes int64) {
	for _, m := range d.Moved {
		if slices.Contains(ways, m.Way) {
			bytes += m.Bytes
		}
	}
	return bytes
}

// cut shortens a text to at most most columns of a terminal, in which some letters take two. It replaces control
// characters with question marks.
func cut(text string, most int) string {
	runes := []rune(text)
	for i, r := range runes {
		if !unicode.IsPrint(r) {
			runes[i] = '?'
		}
	}
	return runewidth.Truncate(string(runes), most, "…")
}

// cell cuts a text to width columns, or pads it.
func cell(text string, width int) string { return runewidth.FillRight(cut(text, width), width) }
