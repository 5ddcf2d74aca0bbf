package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// topFrame draws what happened between two samples, in so many columns and lines at most.
func topFrame(before, now topSample, chosen, width, height int) string {
	seconds := now.at.Sub(before.at).Seconds()
	rate := func(was, is int64) string {
		if seconds <= 0 || is <= was {
			return "-"
		}
		return bytesText(int64(float64(is-was)/seconds)) + "/s"
	}
	files := slices.Clone(now.Files)
	slices.SortStableFunc(files, func(a, b pagecache.FileStatus) int {
		return cmp.Or(cmp.Compare(moved(before, b), moved(before, a)), cmp.Compare(held(b), held(a)))
	})
	counts := fmt.Sprintf("  %s  %s", count(now.Mount.Clients, "client"), count(now.Mount.Mappings, "mapping"))
	lines := []string{"gaiafs " + cut(now.Mount.Mountpoint, width-len("gaiafs ")-len(counts)) + counts}
	lines = append(lines, fmt.Sprintf("%-6s %-14s %10s %10s %10s %10s %s", "", "", "used of", "clean", "dirty", "stale",
		"in, out"))
	for i, d := range now.Devices {
		clean, dirty, stale := held3(now.Files, d.Device)
		in, out := "-", "-"
		if i < len(before.Devices) {
			in = rate(movedBy(before.Devices[i], "in", "peer"), movedBy(d, "in", "peer"))
			out = rate(movedBy(before.Devices[i], "out"), movedBy(d, "out"))
		}
		lines = append(lines, fmt.Sprintf("gpu%-3d %s %10s %10s %10s %10s %s, %s", d.Device,
			bar(d.UsedBytes, d.MemoryBytes, 14),
			bytesText(d.MemoryBytes), clean, dirty, stale, in, out))
	}
	reads := "reads  "
	for _, way := range []struct{ counter, name string }{{"host_read_bytes", "host"},
		{"clean_read_bytes", "read ahead"},
		{"device_read_bytes", "devices"}, {"disk_read_bytes", "disk"}} {
		reads += fmt.Sprintf("%s %s  ", way.name, rate(before.Counters[way.counter], now.Counters[way.counter]))
	}
	lines = append(lines, reads, "users  "+usersText(now.Devices))
	lines = append(lines, "", fmt.Sprintf("  %-40s %10s %10s %8s", "file", "size", "on devices", "mappings"))
	var chosenMap []string
	if chosen < len(files) {
		chosenMap = heatMap(files[chosen])
	}
	room := max(height-len(lines)-len(chosenMap)-2, 1)
	first := max(chosen-room+1, 0)
	for i := first; i < min(len(files), first+room); i++ {
		mark := " "
		if i == chosen {
			mark = ">"
		}
		f := files[i]
		lines = append(lines, fmt.Sprintf("%s %-40s %10s %10s %8d", mark, cut(f.Name, 40), bytesText(f.SizeBytes),
			bytesText(held(f)<<page.Shift), f.Mappings))
	}
	if len(files) == 0 {
		lines = append(lines, "  no device holds anything")
	}
	lines = append(append(lines, ""), chosenMap...)
	var b strings.Builder
	for _, l := range lines[:min(len(lines), height)] {
		b.WriteString(strings.TrimRight(cut(l, width), " ") + "\n")
	}
	return b.String()
}

// heatMap has a line for each device that holds something of a file.
func heatMap(f pagecache.FileStatus) (lines []string) {
	for _, h := range f.Holders {
		lines = append(lines, fmt.Sprintf("gpu%-3d %s", h.Device, h.Map))
	}
	return lines
}

// moved counts what was read of a file on the CPU, and brought to devices or home, since a sample.
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

// held counts the pages of a file on devices.
func held(f pagecache.FileStatus) (pages int64) {
	for _, h := range f.Holders {
		pages += h.Resident
	}
	return pages
}

// held3 is what a device holds of all files.
func held3(files []pagecache.FileStatus, device int) (clean, dirty, stale string) {
	var c, d, s int64
	for _, f := range files {
		for _, h := range f.Holders {
			if h.Device == device {
				c, d, s = c+h.Clean, d+h.Dirty, s+h.Stale
			}
		}
	}
	return bytesText(c << page.Shift), bytesText(d << page.Shift), bytesText(s << page.Shift)
}

// movedBy is what was moved to or from a device in these ways.
func movedBy(d pagecache.DeviceStatus, ways ...string) (bytes int64) {
	for _, m := range d.Moved {
		if slices.Contains(ways, m.Way) {
			bytes += m.Bytes
		}
	}
	return bytes
}

// usersText says how much the programs of each user map, the most first.
func usersText(devices []pagecache.DeviceStatus) string {
	sums := make(map[uint32]int64)
	for _, d := range devices {
		for _, u := range d.Users {
			sums[u.User] += u.Bytes
		}
	}
	var ids []uint32
	for id := range sums {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b uint32) int { return cmp.Or(cmp.Compare(sums[b], sums[a]), cmp.Compare(a, b)) })
	var texts []string
	for _, id := range ids {
		texts = append(texts, fmt.Sprintf("%d maps %s", id, bytesText(sums[id])))
	}
	if len(texts) == 0 {
		return "nobody maps anything"
	}
	return strings.Join(texts, ", ")
}

// bar is a part of something, in so many columns.
func bar(part, whole int64, width int) string {
	filled := 0
	if whole > 0 {
		filled = int(min(part, whole) * int64(width-2) / whole)
	}
	return "[" + strings.Repeat("#", filled) + strings.Repeat(" ", width-2-filled) + "]"
}

// cut shortens a text to so many runes. What would move the cursor of a terminal becomes a question mark.
func cut(text string, most int) string {
	runes := []rune(text)
	for i, r := range runes {
		if !unicode.IsPrint(r) {
			runes[i] = '?'
		}
	}
	if len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return string(runes)
}
