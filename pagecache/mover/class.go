package mover

import "github.com/gaiafs/gaiafs/pagecache/mover/schedule"

// Class says what a transfer is for. Package schedule describes the classes.
type Class = schedule.Class

// The classes, most urgent first.
const (
	Fault     = schedule.Fault
	CPURead   = schedule.CPURead
	Acquire   = schedule.Acquire
	Prefetch  = schedule.Prefetch
	WriteBack = schedule.WriteBack
	Eviction  = schedule.Eviction
)
