package monitor

import (
	"fmt"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// emit reports one value of a metric, with the values of its labels.
type emit func(value float64, labels ...string)

// metric is one name in /metrics. docs/metrics.md lists them all.
type metric struct {
	name   string
	kind   prometheus.ValueType
	help   string
	labels []string
	values func(s *Snapshot, to emit)
}

// histogram is a metric of durations, with one series for each value of its label.
type histogram struct {
	name, help, label string
	of                func(s *Snapshot) map[string]pagecache.Latency
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// metrics are listed in the order of docs/metrics.md.
var metrics = []metric{
	{"gaiafs_build_info", gauge, "1, with the version of the daemon", []string{"version"},
		func(s *Snapshot, to emit) { to(1, s.Version) }},
	single("gaiafs_start_time_seconds", "when the mount was made, in seconds since 1970",
		func(s *Snapshot) float64 { return float64(s.Started.UnixMilli()) / 1e3 }),
	single("gaiafs_sessions", "connections of client libraries",
		func(s *Snapshot) float64 { return float64(s.Sessions) }),
	single("gaiafs_mappings", "mappings of these connections", func(s *Snapshot) float64 { return float64(s.Mappings) }),

	ofDevice("gaiafs_device_info", "1, with kind, name and UUID of the device", []string{"kind", "name", "uuid"},
		func(d *pagecache.DeviceStatus, to emit) { to(1, d.Kind, d.Name, d.UUID) }),
	ofDevice("gaiafs_device_memory_bytes", "the budget of the cache (--gpu-memory)", nil,
		func(d *pagecache.DeviceStatus, to emit) { to(float64(d.MemoryBytes)) }),
	ofDevice("gaiafs_device_used_bytes", "bytes in extents", nil,
		func(d *pagecache.DeviceStatus, to emit) { to(float64(d.UsedBytes)) }),
	ofDevice("gaiafs_device_mapped_bytes", "of these, bytes that clients map: they cannot be evicted", nil,
		func(d *pagecache.DeviceStatus, to emit) { to(float64(d.MappedBytes)) }),
	ofDevice("gaiafs_device_extents", "extents of the device", nil,
		func(d *pagecache.DeviceStatus, to emit) { to(float64(d.Extents)) }),
	ofDevice("gaiafs_device_lost", "1 if the device is gone", nil,
		func(d *pagecache.DeviceStatus, to emit) { to(number(d.Lost)) }),
	{"gaiafs_device_resident_bytes", gauge, "pages of files on the device, in views too, that are `clean`, `stale` " +
		"(home has newer bytes) or `dirty` (the device has newer bytes); a page that is stale and dirty counts twice", []string{"device", "state"},
		resident},
	ofDevice("gaiafs_device_transfers_total",
		"transfers by class (what for) and way (`in` from the host, `out` to the "+
			"host, `peer` from another device, `through` from the host to another device, `within`: "+
			"zeros)", []string{"class", "way"},
		func(d *pagecache.DeviceStatus, to emit) {
			for _, m := range d.Moved {
				to(float64(m.Calls), m.Class, m.Way)
			}
		}),
	ofDevice("gaiafs_device_transferred_bytes_total", "their bytes", []string{"class", "way"},
		func(d *pagecache.DeviceStatus, to emit) {
			for _, m := range d.Moved {
				to(float64(m.Bytes), m.Class, m.Way)
			}
		}),
	{"gaiafs_views", gauge, "views", []string{"device"}, func(s *Snapshot, to emit) {
		views(s, to, func(pagecache.ViewStatus) int64 { return 1 })
	}},
	{"gaiafs_view_bytes", gauge, "device memory that views take", []string{"device"}, func(s *Snapshot, to emit) {
		views(s, to, func(v pagecache.ViewStatus) int64 { return v.DeviceBytes })
	}},

	single("gaiafs_files", "files that devices hold a part of",
		func(s *Snapshot) float64 { return float64(len(s.Files)) }),
	single("gaiafs_files_failing", "of these, files whose released bytes cannot be written home",
		func(s *Snapshot) float64 {
			return float64(count(s, func(f *pagecache.FileStatus) bool { return f.Error != "" }))
		}),
	single("gaiafs_files_busy", "of these, files that do not answer: their backing filesystem or a device hangs",
		func(s *Snapshot) float64 {
			return float64(count(s, func(f *pagecache.FileStatus) bool { return f.BusySeconds > 0 }))
		}),
	single("gaiafs_write_back_waiting_bytes", "bytes that were released and are not home yet", func(s *Snapshot) float64 {
		n := int64(0)
		for i := range s.Files {
			n += s.Files[i].WaitingBytes
		}
		return float64(n)
	}),
	single("gaiafs_write_back_oldest_seconds", "age of the oldest of these bytes", func(s *Snapshot) (oldest float64) {
		for i := range s.Files {
			oldest = max(oldest, s.Files[i].PendingSeconds)
		}
		return oldest
	}),
	{"gaiafs_host_memory_bytes", gauge, "host memory that grows with the work of programs, by use",
		[]string{"class"}, func(s *Snapshot, to emit) {
			for class, n := range s.Memory.Classes {
				to(float64(n), class)
			}
		}},
	single("gaiafs_host_memory_limit_bytes", "--host-memory", func(s *Snapshot) float64 {
		return float64(s.Memory.LimitBytes)
	}),

	counted("gaiafs_write_back_failures_total", "attempts to bring released bytes home that failed",
		"write_back_failures"),
	counted("gaiafs_maps_total", "mappings made", "maps"),
	counted("gaiafs_acquires_total", "acquires", "acquires"),
	counted("gaiafs_releases_total", "releases", "releases"),
	counted("gaiafs_released_pages_total", "pages that releases found modified", "released_pages"),
	counted("gaiafs_filled_pages_total", "pages brought from home to devices that did not have them", "filled_pages"),
	counted("gaiafs_collects_total", "transfers from a device home", "collects"),
	counted("gaiafs_collected_pages_total", "their pages", "collected_pages"),
	counted("gaiafs_merged_pages_total", "of these, pages that had also changed at home", "merged_pages"),
	counted("gaiafs_overlapping_bytes_total", "conflicts: bytes that two writers stored without synchronising, with "+
		"different values", "overlapping_bytes"),
	counted("gaiafs_invalidations_total", "ranges that the kernel was told to drop", "invalidations"),
	counted("gaiafs_evictions_total", "extents evicted to make room", "evictions"),
	counted("gaiafs_lost_pages_total", "released pages lost with a device", "lost_pages"),
	counted("gaiafs_home_replacements_total", "times that a backing file was found to have been changed directly",
		"home_replacements"),
	{"gaiafs_cpu_reads_total", counter,
		"CPU reads of files that devices hold a part of, by what " +
			"served them: the `host`'s page cache, `clean` pages that a device gave before, a `device`, the `disk`, or " +
			"`collect`, which brought the newest bytes home first", []string{"from"},
		func(s *Snapshot, to emit) {
			for from, name := range map[string]string{"host": "host_reads", "clean": "clean_reads",
				"device": "device_reads",
				"disk":   "disk_reads", "collect": "collecting_reads"} {
				to(float64(s.Counters[name]), from)
			}
		}},
	{"gaiafs_cpu_read_bytes_total", counter, "their bytes", []string{"from"}, func(s *Snapshot, to emit) {
		for from, name := range map[string]string{"host": "host_read_bytes", "clean": "clean_read_bytes",
			"device": "device_read_bytes", "disk": "disk_read_bytes"} {
			to(float64(s.Counters[name]), from)
		}
		to(float64(s.Counters["collecting_read_pages"]*page.Size), "collect")
	}},
}

var histograms = []histogram{
	{"gaiafs_fuse_request_seconds", "requests of the kernel, by kind", "kind",
		func(s *Snapshot) map[string]pagecache.Latency { return s.Requests }},
	{"gaiafs_operation_seconds", "what the cache does: `fill` and `invalidate` as above, `collect`, `release`, and " +
		"`collecting_read`, a CPU read that found the newest bytes on a device", "operation",
		func(s *Snapshot) map[string]pagecache.Latency { return s.Latencies }},
}

// single makes a gauge without labels.
func single(name, help string, value func(s *Snapshot) float64) metric {
	return metric{name, gauge, help, nil, func(s *Snapshot, to emit) { to(value(s)) }}
}

// counted makes a metric of one of the cache's counters.
func counted(name, help, of string) metric {
	return metric{name, counter, help, nil, func(s *Snapshot, to emit) { to(float64(s.Counters[of])) }}
}

// ofDevice makes a metric with the label device and others. If its name ends with _total, it is a counter.
func ofDevice(name, help string, labels []string, values func(d *pagecache.DeviceStatus, to emit)) metric {
	kind := gauge
	if name[len(name)-6:] == "_total" {
		kind = counter
	}
	return metric{name, kind, help, append([]string{"device"}, labels...), func(s *Snapshot, to emit) {
		for i := range s.Devices {
			d := &s.Devices[i]
			values(d, func(v float64, labels ...string) {
				to(v, append([]string{strconv.Itoa(d.Device)},
					labels...)...)
			})
		}
	}}
}

func number(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

func count(s *Snapshot, fits func(f *pagecache.FileStatus) bool) (n int) {
	for i := range s.Files {
		if fits(&s.Files[i]) {
			n++
		}
	}
	return n
}

// resident sums up what devices hold of all files.
func resident(s *Snapshot, to emit) {
	type sum struct{ clean, stale, dirty int64 }
	of := make(map[int]*sum)
	for i := range s.Devices {
		of[s.Devices[i].Device] = &sum{}
	}
	for i := range s.Files {
		for _, h := range s.Files[i].Holders {
			if n := of[h.Device]; n != nil {
				n.clean += h.Clean << page.Shift
				n.stale += h.Stale << page.Shift
				n.dirty += h.Dirty << page.Shift
			}
		}
		for _, v := range s.Files[i].Views {
			if n := of[v.Device]; n != nil {
				clean, stale := v.Held()
				n.clean += clean
				n.stale += stale
			}
		}
	}
	for device, n := range of {
		for state, bytes := range map[string]int64{"clean": n.clean, "stale": n.stale, "dirty": n.dirty} {
			to(float64(bytes), strconv.Itoa(device), state)
		}
	}
}

// views sums up a figure over all views. A view with bytes of several files is in the status of each.
func views(s *Snapshot, to emit, figure func(v pagecache.ViewStatus) int64) {
	type key struct{ device, files int }
	of := make(map[key]int64)
	for i := range s.Files {
		for _, v := range s.Files[i].Views {
			of[key{v.Device, max(1, v.Files)}] += figure(v)
		}
	}
	for i := range s.Devices {
		device, n := s.Devices[i].Device, int64(0)
		for k, sum := range of {
			if k.device == device {
				n += sum / int64(k.files)
			}
		}
		to(float64(n), strconv.Itoa(device))
	}
}

// Table returns the rows of docs/metrics.md.
func Table() string {
	text := "| name | kind | labels | meaning |\n| --- | --- | --- | --- |\n"
	row := func(name, kind, help string, labels []string) {
		list := ""
		for i, l := range labels {
			if i > 0 {
				list += ", "
			}
			list += "`" + l + "`"
		}
		text += fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, list, help)
	}
	for _, m := range metrics {
		kind := "gauge"
		if m.kind == counter {
			kind = "counter"
		}
		row(m.name, kind, m.help, m.labels)
	}
	for _, h := range histograms {
		row(h.name, "histogram", h.help, []string{h.label})
	}
	return text
}
