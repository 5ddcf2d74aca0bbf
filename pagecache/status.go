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

// StatusVersion is the version of Status's JSON form. Fields are added without changing it; it grows when one is
// removed or changes its meaning.
const StatusVersion = 1

// Status is what `gaiafs status` shows. Its JSON form is documented in docs/status.md.
type Status struct {
	Version int            `json:"version"`
	Devices []DeviceStatus `json:"devices"`
	Files   []FileStatus   `json:"files"`
	// Memory is the host memory that grows with what programs do, and --host-memory.
	Memory MemoryStatus `json:"memory"`
	// BaseBytes is what base copies take of BaseLimit bytes of host memory, StateBytes what versions and page states
	// take, DigestBytes what the digests of tracked pages take.
	BaseBytes  int64 `json:"base_bytes"`
	BaseLimit  int64 `json:"base_limit"`
	StateBytes int64 `json:"state_bytes"`
	// PinnedBytes is the pinned memory of the host in use, of PinnedLimit; no extent has PinnedSpareBytes of it.
	PinnedBytes      int64 `json:"pinned_bytes"`
	PinnedSpareBytes int64 `json:"pinned_spare_bytes"`
	PinnedLimit      int64 `json:"pinned_limit"`
	// PinnedTenants is who owns how much of it.
	PinnedTenants []Account `json:"pinned_tenants"`
	// CleanBytes is what pages read ahead from devices for the CPU take of CleanLimit bytes of host memory.
	CleanBytes int64 `json:"clean_bytes"`
	CleanLimit int64 `json:"clean_limit"`
	// Disk is what reads of home take that the host's page cache does not serve.
	Disk        ReadCost `json:"disk"`
	DigestBytes int64    `json:"digest_bytes"`
	// Goroutines is the number of goroutines of the daemon, HeapLiveBytes what its heap held in use at the last garbage
	// collection: for those who look for leaks.
	Goroutines    int   `json:"goroutines"`
	HeapLiveBytes int64 `json:"heap_live_bytes"`
	// WriteBackInterval is in seconds.
	WriteBackInterval float64 `json:"write_back_interval_s"`
	// DirectReads is "auto" where devices are filled past the host's page cache if that is possible, else "off";
	// Buffered has the reasons why it was not possible for some file.
	DirectReads string   `json:"direct_reads"`
	Buffered    []string `json:"direct_reads_refused"`
	// Losses is what was lost with devices since the mount was made.
	Losses    []*Loss            `json:"losses"`
	Counters  map[string]int64   `json:"counters"`
	Latencies map[string]Latency `json:"latencies"`
}

// DeviceStatus describes a device and what of its memory is used.
type DeviceStatus struct {
	Device int    `json:"device"`
	Kind   string `json:"kind"`
	// UUID names the GPU as nvidia-smi does; empty where the kind has none.
	UUID string `json:"uuid,omitempty"`
	Name string `json:"name"`
	// MemoryBytes is the budget of now, MemoryWhy says where it comes from where that is not how it was mounted.
	// UsedBytes is what extents take of it, MappedBytes what clients map of them.
	MemoryBytes int64  `json:"memory_bytes"`
	MemoryWhy   string `json:"memory_why,omitempty"`
	UsedBytes   int64  `json:"used_bytes"`
	MappedBytes int64  `json:"mapped_bytes"`
	Extents     int    `json:"extents"`
	Lost        bool   `json:"lost"`
	// PinnedBytes is what extents take of pinned memory of the host. MovedOutBytes moved there from the device's own
	// memory so far, MovedInBytes back.
	PinnedBytes   int64 `json:"pinned_bytes"`
	MovedInBytes  int64 `json:"moved_in_bytes"`
	MovedOutBytes int64 `json:"moved_out_bytes"`
	// Brackets are those that are open, BracketsWaiting those that wait for memory.
	Brackets        int `json:"brackets"`
	BracketsWaiting int `json:"brackets_waiting"`
	// Evicted is what left the device's own memory, or pinned memory, since the mount was made, and why, the most bytes
	// first.
	Evicted []residency.Departure `json:"evicted"`
	// OverBus is what brackets that ended had in pinned memory.
	OverBus residency.OverBus `json:"over_bus"`
	// Eviction is the rule that says which extent goes first when the device is full.
	Eviction string `json:"eviction"`
	// Transfers is the discipline that says which transfer begins next.
	Transfers string `json:"transfers"`
	// Users is what the programs of each user map.
	Users []UserPins `json:"users"`
	// Pins is what extents of pinned files take on each user's account, PinnedIdleBytes what nobody maps of that.
	Pins            []UserPins `json:"pins"`
	PinnedIdleBytes int64      `json:"pinned_idle_bytes"`
	// Tenants is who owns how much of it, and has a share of how much: who owns most above the share gives way first.
	Tenants []Account `json:"tenants"`
	// Read is what CPU reads from the device take.
	Read ReadCost `json:"read"`
	// Moved is what was moved to, from and within the device so far.
	Moved []mover.Moved `json:"moved"`
}

// ReadCost is what reads from one place take, as moving averages.
type ReadCost struct {
	LatencyMicros float64 `json:"latency_us"`
	// Rate is what the last reads came to, each with its latency.
	Rate float64 `json:"bytes_per_s"`
	// Reads is the number of reads that were measured, QueuedBytes what is under way now.
	Reads       int64 `json:"reads"`
	QueuedBytes int64 `json:"queued_bytes"`
	// Stuck says that a read was given up that has not ended.
	Stuck bool `json:"stuck"`
}

func readCost(s cost.Source) ReadCost {
	e := s.Estimate()
	return ReadCost{
		LatencyMicros: float64(e.Latency) / 1e3, Rate: e.Rate, Reads: e.Reads, QueuedBytes: e.Queued, Stuck: e.Stuck,
	}
}

// UserPins is how much of a device the programs of one user map. An extent that several map counts once for each user.
type UserPins = residency.UserPins

// Account is how much of a device a tenant owns.
type Account = tenants.Account

// TenantOf names the tenant that a user is.
func TenantOf(user uint32) string { return string(tenants.User(user)) }

// FileStatus describes a file that devices hold something of.
type FileStatus struct {
	ID   FileID `json:"-"`
	Name string `json:"name"`
	// Inode is the file's number as programs see it on the mount. The mount sets it.
	Inode uint64 `json:"inode"`
	// SizeBytes is the size of the file.
	SizeBytes int64 `json:"size_bytes"`
	Mappings  int   `json:"mappings"`
	// MapPages is how many pages a letter of the holders' maps stands for.
	MapPages int64 `json:"map_pages"`
	// BusySeconds is set where the file does not answer: it has been waiting for home, or for a device, for so long.
	// Then only Name and Counters are of now, and the rest is what was seen last.
	BusySeconds float64 `json:"busy_s,omitempty"`
	// Pinned says on which devices what there is of the file stays: "all", or their numbers; empty for none. PinnedBy
	// is the user on whose account.
	Pinned   string `json:"pinned,omitempty"`
	PinnedBy uint32 `json:"pinned_by,omitempty"`
	// Bases is the number of base copies held, Error why released bytes could not be brought home, until they are
	// there.
	Bases   int64           `json:"bases"`
	Error   string          `json:"error,omitempty"`
	Holders []HoldingStatus `json:"holders"`
	// Views has the views with bytes of the file. One that has bytes of several files is named with each.
	Views []ViewStatus `json:"views,omitempty"`
	// PendingSeconds is the age of the oldest released bytes that are not home, 0 if all are.
	PendingSeconds float64 `json:"pending_s"`
	// WaitingBytes are released and not home.
	WaitingBytes int64            `json:"waiting_bytes"`
	Counters     map[string]int64 `json:"counters"`
}

// HoldingStatus is what one device holds of a file, in pages.
type HoldingStatus struct {
	Device int `json:"device"`
	// ExtentBytes is the size of the largest extent.
	ExtentBytes int64 `json:"extent_bytes"`
	Extents     int   `json:"extents"`
	// Memory is what the extents take of the device's memory, in bytes, PinnedExtents are those in pinned memory of the
	// host.
	Memory        int64 `json:"memory_bytes"`
	PinnedExtents int   `json:"pinned_extents"`
	Resident      int64 `json:"resident_pages"`
	Tracked       int64 `json:"tracked_pages"`
	// Stale pages lack bytes that home has; Dirty pages have released bytes that home lacks; Clean pages are neither.
	Clean int64 `json:"clean_pages"`
	Stale int64 `json:"stale_pages"`
	Dirty int64 `json:"dirty_pages"`
	// Map has a letter for each MapPages pages of the file, in order: what the worst of them is, d(irty), s(tale) or
	// c(lean), and a dot where none is resident.
	Map string `json:"map"`
}

// ViewStatus describes a view.
type ViewStatus struct {
	Device int    `json:"device"`
	User   uint32 `json:"user"` // whose programs share it
	// Bytes is the size of the view, DeviceBytes what its extents take of the device's memory, HostBytes what its list
	// of segments takes of --host-memory.
	Bytes       int64 `json:"bytes"`
	DeviceBytes int64 `json:"device_bytes"`
	HostBytes   int64 `json:"host_bytes"`
	Segments    int   `json:"segments"`
	Files       int   `json:"files"`
	Mappings    int   `json:"mappings"`
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
	}
}

// heapLive is what the last garbage collection of this process found in use, in bytes. What is resident says less about
// leaks: it moves with how much garbage there was between two collections.
func heapLive() int64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return int64(sample[0].Value.Uint64())
}

// Status returns a snapshot. Files are seen one after another, not at one moment. It blocks for lookPatience at most:
// no file that hangs holds it up.
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
		Disk:              readCost(c.clean.Disk().Now()),
		Goroutines:        runtime.NumGoroutine(),
		HeapLiveBytes:     heapLive(),
		WriteBackInterval: c.interval.Seconds(),
		DirectReads:       "auto",
		Buffered:          c.snapshotNoDirect(),
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
	s.PinnedLimit = c.pinned.Limit()
	s.PinnedTenants = c.pinned.Tenants()
	if c.bufferedReads {
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
		Transfers: *d.transfers.Load(),
		Lost:      d.lost.Load(),
		Users:     memory.Users,
		Pins:      memory.Pins, PinnedIdleBytes: memory.PinnedIdle,
		Tenants: memory.Tenants,
		Read:    readCost(d.moves.Cost.Now()),
		Moved:   d.moves.Moved(),
	}
}
