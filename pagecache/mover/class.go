package mover

import "github.com/gaiafs/gaiafs/pagecache/mover/schedule"

// Class says what a transfer is for: package schedule has the meaning of each.
type Class = schedule.Class

// The classes, the most urgent first.
const (
	Fault     = schedule.Fault
	CPURead   = schedule.CPURead
	Acquire   = schedule.Acquire
	Prefetch  = schedule.Prefetch
	WriteBack = schedule.WriteBack
	Eviction  = schedule.Eviction
)
