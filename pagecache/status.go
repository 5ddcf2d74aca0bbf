package pagecache

import (
	"cmp"
	"runtime"
	"runtime/metrics"
	"slices"

	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// StatusVersion is the version of Status's JSON form. New fields do not change it. It grows when a field is removed or
// changes its meaning.
const StatusVersion = 1

// Status is the report of `gaiafs status`. docs/status.md documents its JSON form.
type Status struct {
	Version int            `json:"version"`
	Devices []DeviceStatus `json:"devices"`
	Files   []FileStatus   `json:"files"`
	// Memory is the host memory that grows with what programs do. --host-memory bounds it.
	Memory MemoryStatus `json:"memory"`
	// BaseBytes is the host memory of base copies, at most BaseLimit. StateBytes is that of versions and page states,
	// DigestBytes that of the digests of tracked pages.
	BaseBytes  int64 `json:"base_bytes"`
	BaseLimit  int64 `json:"base_limit"`
	StateBytes int64 `json:"state_bytes"`
	// PinnedBytes is the pinned host memory in use, at most PinnedLimit. PinnedSpareBytes of it hold no extent.
	// PinnedFileBytes of it are what files count for that are pinned on the host.
	PinnedBytes      int64 `json:"pinned_bytes"`
	PinnedSpareBytes int64 `json:"pinned_spare_bytes"`
	PinnedFileBytes  int64 `json:"pinned_file_bytes"`
	PinnedLimit      int64 `json:"pinned_limit"`
	// PinnedHotBytes is what hot files have in addition, at most half of PinnedLimit.
	PinnedHotBytes int64 `json:"pinned_hot_bytes"`
	// PinnedTenants lists who owns how much of it.
	PinnedTenants []Account `json:"pinned_tenants"`
	// CleanBytes is the host memory of pages read ahead from devices for the CPU, at most CleanLimit.
	CleanBytes int64 `json:"clean_bytes"`
	CleanLimit int64 `json:"clean_limit"`
	// Disk is the cost of reads of home that the host's page cache does not serve.
	Disk        ReadCost `json:"disk"`
	DigestBytes int64    `json:"digest_bytes"`
	// Goroutines is the number of goroutines of the daemon. HeapLiveBytes is what its heap had in use at the last
	// garbage collection. Both help to find leaks.
	Goroutines    int   `json:"goroutines"`
	HeapLiveBytes int64 `json:"heap_live_bytes"`
	// WriteBackInterval is in seconds.
	WriteBackInterval float64 `json:"write_back_interval_s"`
	// DirectReads is "auto" if devices are filled past the host's page cache when possible, else "off". Buffered lists
	// why that was not possible for some files.
	DirectReads string   `json:"direct_reads"`
	Buffered    []string `json:"direct_reads_refused"`
	// Losses lists what was lost with devices since the mount was made.
	Losses    []*Loss            `json:"losses"`
	Counters  map[string]int64   `json:"counters"`
	Latencies map[string]Latency `json:"latencies"`
}

// DeviceStatus describes a device and the use of its memory.
type DeviceStatus struct {
	Device int    `json:"device"`
	Kind   string `json:"kind"`
	// UUID names the GPU as nvidia-smi does; empty if the kind has no UUIDs.
	UUID string `json:"uuid,omitempty"`
	Name string `json:"name"`
	// MemoryBytes is the current budget. MemoryWhy says where it comes from, unless from the mount. UsedBytes
	// is the memory of extents, MappedBytes the part of it that clients map.
	MemoryBytes int64  `json:"memory_bytes"`
	MemoryWhy   string `json:"memory_why,omitempty"`
	UsedBytes   int64  `json:"used_bytes"`
	MappedBytes int64  `json:"mapped_bytes"`
	Extents     int    `json:"extents"`
	Lost        bool   `json:"lost"`
	// PinnedBytes is the pinned host memory of the device's extents. MovedOutBytes moved there from the device's own
	// memory so far, MovedInBytes moved back.
	PinnedBytes   int64 `json:"pinned_bytes"`
	MovedInBytes  int64 `json:"moved_in_bytes"`
	MovedOutBytes int64 `json:"moved_out_bytes"`
	// Brackets counts the open brackets, BracketsWaiting those that wait for memory.
	Brackets        int `json:"brackets"`
	BracketsWaiting int `json:"brackets_waiting"`
	// Evicted lists what left the device's own memory, or pinned memory, since the mount was made, and why, most bytes
	// first.
	Evicted []residency.Departure `json:"evicted"`
	// OverBus is what ended brackets had in pinned memory.
	OverBus residency.OverBus `json:"over_bus"`
	// Placement is one of PlacementNames. Delayed counts what brackets had in pinned memory because the threshold was
	// not reached.
	Placement string            `json:"placement"`
	Delayed   residency.Delayed `json:"delayed"`
	// Eviction is the rule that says which extent goes first when the device is full.
	Eviction string `json:"eviction"`
	// Transfers is the discipline that says which transfer begins next.
	Transfers string `json:"transfers"`
	// Users lists what the programs of each user map.
	Users []UserPins `json:"users"`
	// Pins lists the memory of pinned files by the user who is charged for it. PinnedIdleBytes is the unmapped part of
	// it.
	Pins            []UserPins `json:"pins"`
	PinnedIdleBytes int64      `json:"pinned_idle_bytes"`
	// Tenants lists who owns how much of the memory, and the shares. The tenant furthest above its share gives way
	// first.
	Tenants []Account `json:"tenants"`
	// Read is the cost of CPU reads from the device.
	Read ReadCost `json:"read"`
	// Moved is what was moved to, from and within the device so far.
	Moved []mover.Moved `json:"moved"`
}

// ReadCost is the cost of reads from one place, as moving averages.
type ReadCost struct {
	LatencyMicros float64 `json:"latency_us"`
	// Rate is the speed of the last reads, each with its latency.
	Rate float64 `json:"bytes_per_s"`
	// Reads is the number of reads that were measured, QueuedBytes what is being read now.
	Reads       int64 `json:"reads"`
	QueuedBytes int64 `json:"queued_bytes"`
	// Stuck says that a read was given up and has not ended.
	Stuck bool `json:"stuck"`
}

func readCost(e cost.Estimate) ReadCost {
	return ReadCost{
		LatencyMicros: float64(e.Latency) / 1e3, Rate: e.Rate, Reads: e.Reads, QueuedBytes: e.Queued, Stuck: e.Stuck,
	}
}

// UserPins is how much of a device the programs of one user map. An extent mapped by several users counts once for
// each.
type UserPins = residency.UserPins

// Account is how much of a device a tenant owns.
type Account = tenants.Account

// TenantOf names the tenant of a user.
func TenantOf(user uint32) string { return string(tenants.User(user)) }

// FileStatus describes a file that is on devices.
type FileStatus struct {
	ID   FileID `json:"-"`
	Name string `json:"name"`
	// Inode is the file's inode number as programs see it on the mount. The mount sets it.
	Inode uint64 `json:"inode"`
	// SizeBytes is the size of the file.
	SizeBytes int64 `json:"size_bytes"`
	Mappings  int   `json:"mappings"`
	// MapPages is the number of pages that each letter of the holders' maps stands for.
	MapPages int64 `json:"map_pages"`
	// BusySeconds is set if the file does not answer: how long it has been waiting for home or for a device. Then only
	// Name and Counters are current, and the rest is as seen last.
	BusySeconds float64 `json:"busy_s,omitempty"`
	// Pinned says on which devices the file's extents stay, and whether its pages are locked on the host: as the text
	// of a Pinning; empty for none. PinnedBy is the user who is charged. LockedBytes of the pages are locked so far.
	// LockError says why locking failed.
	Pinned      string `json:"pinned,omitempty"`
	PinnedBy    uint32 `json:"pinned_by,omitempty"`
	LockedBytes int64  `json:"locked_bytes,omitempty"`
	LockError   string `json:"lock_error,omitempty"`
	// Bases is the number of base copies. Error says why released bytes could not be brought home; it is empty once
	// they are there.
	Bases   int64           `json:"bases"`
	Error   string          `json:"error,omitempty"`
	Holders []HoldingStatus `json:"holders"`
	// Views lists the views with bytes of the file. A view with bytes of several files is listed with each.
	Views []ViewStatus `json:"views,omitempty"`
	// PendingSeconds is the age of the oldest released bytes that are not home; 0 if all are.
	PendingSeconds float64 `json:"pending_s"`
	// WaitingBytes counts the released bytes that are not home.
	WaitingBytes int64            `json:"waiting_bytes"`
	Counters     map[string]int64 `json:"counters"`
}

// HoldingStatus is what one device holds of a file, in pages.
type HoldingStatus struct {
	Device int `json:"device"`
	// ExtentBytes is the size of the largest extent.
	ExtentBytes int64 `json:"extent_bytes"`
	Extents     int   `json:"extents"`
	// Memory is the bytes of device memory that the extents take. PinnedExtents counts the extents in pinned host
	// memory.
	Memory        int64 `json:"memory_bytes"`
	PinnedExtents int   `json:"pinned_extents"`
	Resident      int64 `json:"resident_pages"`
	Tracked       int64 `json:"tracked_pages"`
	// Stale pages lack bytes that home has. Dirty pages have released bytes that home lacks. Clean pages are neither.
	Clean int64 `json:"clean_pages"`
	Stale int64 `json:"stale_pages"`
	Dirty int64 `json:"dirty_pages"`
	// Map has a letter for each MapPages pages of the file, in order. It stands for the worst page of them: d(irty),
	// s(tale) or c(lean), or a dot if none is resident.
	Map string `json:"map"`
}

func (c *Counters) snapshot() map[string]int64 {
	return map[string]int64{
		"maps":                  c.Maps.Load(),
		"acquires":              c.Acquires.Load(),
		"releases":              c.Releases.Load(),
		"released_pages":        c.ReleasedPages.Load(),
		"fills":                 c.Fills.Load(),
		"filled_pages":          c.FilledPages.Load(),
		"refreshed_pages":       c.RefreshedPages.Load(),
		"patched_pages":         c.PatchedPages.Load(),
		"locked_pages":          c.LockedPages.Load(),
		"cached_pages":          c.CachedPages.Load(),
		"direct_pages":          c.DirectPages.Load(),
		"buffered_pages":        c.BufferedPages.Load(),
		"prefetched_pages":      c.PrefetchedPages.Load(),
		"view_pages":            c.ViewPages.Load(),
		"collecting_reads":      c.CollectingReads.Load(),
		"collecting_read_pages": c.CollectingReadPages.Load(),
		"flight_pages":          c.FlightPages.Load(),
		"flight_reads":          c.FlightReads.Load(),
		"flight_read_bytes":     c.FlightReadBytes.Load(),
		"peer_copies":           c.PeerCopies.Load(),
		"peer_copy_pages":       c.PeerCopyPages.Load(),
		"collects":              c.Collects.Load(),
		"collected_pages":       c.CollectedPages.Load(),
		"merged_pages":          c.MergedPages.Load(),
		"parallel_pages":        c.ParallelPages.Load(),
		"overlapping_bytes":     c.OverlappingBytes.Load(),
		"invalidations":         c.Invalidations.Load(),
		"evictions":             c.Evictions.Load(),
		"lost_pages":            c.LostPages.Load(),
		"home_replacements":     c.HomeReplacements.Load(),
		"baseless_pages":        c.BaselessPages.Load(),
		"past_end_pages":        c.PastEndPages.Load(),
		"write_back_failures":   c.WriteBackFailures.Load(),
		"brackets":              c.Brackets.Load(),
		"extents_moved_in":      c.MovedIn.Load(),
		"extents_moved_out":     c.MovedOut.Load(),
		"extents_round_trips":   c.RoundTrips.Load(),

		"host_reads":            c.HostReads.Load(),
		"host_read_bytes":       c.HostReadBytes.Load(),
		"clean_reads":           c.CleanReads.Load(),
		"clean_read_bytes":      c.CleanReadBytes.Load(),
		"device_reads":          c.DeviceReads.Load(),
		"device_read_bytes":     c.DeviceReadBytes.Load(),
		"disk_reads":            c.DiskReads.Load(),
		"disk_read_bytes":       c.DiskReadBytes.Load(),
		"device_read_fallbacks": c.DeviceReadFallbacks.Load(),
		"ahead_bytes":           c.AheadBytes.Load(),
		"ahead_unused_bytes":    c.AheadUnusedBytes.Load(),
		"pushed_bytes":          c.PushedBytes.Load(),
	}
}

// heapLive returns the bytes that the last garbage collection of this process found in use. Resident memory says less
// about leaks: it varies with the garbage between two collections.
func heapLive() int64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return int64(sample[0].Value.Uint64())
}

// Status returns a snapshot. It looks at the files one after another, not at one moment. It blocks for at most
// lookPatience: a file that hangs does not hold it up.
func (c *Cache) Status() Status {
	s := Status{
		Version:           StatusVersion,
		Devices:           []DeviceStatus{},
		Files:             []FileStatus{},
		Memory:            c.memory.status(),
		BaseBytes:         c.counters.Bases.Load() * page.Size,
		BaseLimit:         c.memory.limit,
		CleanBytes:        c.clean.Bytes(),
		CleanLimit:        c.clean.Limit,
		Disk:              readCost(c.clean.Disk().Estimate()),
		Goroutines:        runtime.NumGoroutine(),
		HeapLiveBytes:     heapLive(),
		WriteBackInterval: c.interval.Seconds(),
		DirectReads:       "auto",
		Buffered:          c.homes.NoDirect(),
		Losses:            append([]*Loss{}, c.snapshotLosses()...),
		Counters:          c.counters.snapshot(),
		Latencies: map[string]Latency{
			"fill":            c.counters.FillTime.Snapshot(),
			"collect":         c.counters.CollectTime.Snapshot(),
			"release":         c.counters.ReleaseTime.Snapshot(),
			"collecting_read": c.counters.CollectingReadTime.Snapshot(),
			"invalidate":      c.counters.InvalidateTime.Snapshot(),
		},
	}
	s.PinnedBytes, s.PinnedSpareBytes = c.pinned.Used()
	s.PinnedFileBytes = c.pinned.Files()
	s.PinnedHotBytes = c.pinned.Hot()
	s.PinnedLimit = c.pinned.Limit()
	s.PinnedTenants = c.pinned.Tenants()
	if c.homes.Buffered {
		s.DirectReads = "off"
	}
	for _, v := range c.glances() {
		s.Files = append(s.Files, v.FileStatus)
		s.DigestBytes += v.digests
		s.StateBytes += v.state
	}
	slices.SortFunc(s.Files, func(a, b FileStatus) int { return cmp.Compare(a.Name, b.Name) })
	for _, d := range c.devices {
		s.Devices = append(s.Devices, d.status())
	}
	return s
}

func placementName(threshold bool) string {
	if threshold {
		return PlaceByThreshold
	}
	return PlaceEagerly
}

func (d *device) status() DeviceStatus {
	memory := d.room.Status()
	return DeviceStatus{
		Device:      d.info.Ordinal,
		Kind:        d.info.Kind.String(),
		UUID:        d.info.UUID.String(),
		Name:        d.info.Name,
		MemoryBytes: memory.Budget,
		MemoryWhy:   memory.Why,
		UsedBytes:   d.Used(),
		MappedBytes: memory.Mapped,
		Extents:     memory.Extents,
		Eviction:    memory.Eviction,
		PinnedBytes: memory.Pinned, MovedInBytes: memory.MovedIn, MovedOutBytes: memory.MovedOut,
		Brackets: memory.Brackets, BracketsWaiting: memory.Waiting,
		Evicted: memory.Departures, OverBus: memory.OverBus,
		Placement: placementName(memory.Threshold), Delayed: memory.Delayed,
		Transfers: *d.transfers.Load(),
		Lost:      d.lost.Load(),
		Users:     memory.Users,
		Pins:      memory.Pins, PinnedIdleBytes: memory.PinnedIdle,
		Tenants: memory.Tenants,
		Read:    readCost(d.moves.Cost.Estimate()),
		Moved:   d.moves.Moved(),
	}
}
