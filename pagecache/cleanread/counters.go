package cleanread

import "sync/atomic"

// Counters count CPU reads of pages that home has, in files that are on devices, by the place that served them.
type Counters struct {
	HostReads, HostReadBytes     atomic.Int64
	CleanReads, CleanReadBytes   atomic.Int64
	DeviceReads, DeviceReadBytes atomic.Int64
	DiskReads, DiskReadBytes     atomic.Int64
	DeviceReadFallbacks          atomic.Int64
	AheadBytes, AheadUnusedBytes atomic.Int64
	PushedBytes                  atomic.Int64
}
