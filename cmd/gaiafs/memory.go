package main

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// hostShare is the part of the machine's memory that base copies may take where nobody says: programs that write one
// file of a few GiB on several devices are not to be slowed down by it, and others not to notice.
const hostShare = 16

// leastHostMemory is the least that --host-memory may be.
const leastHostMemory = 1 << 20

// cgroupLimit has the memory that the control group of this process may use (cgroup v2, memory.max).
const cgroupLimit = "/sys/fs/cgroup/memory.max"

// pinnedShare is how many times defaultHostMemory may be pinned for what devices have no room for.
const pinnedShare = 4

// defaultHostMemory is a sixteenth of the memory that this process may use, and no less than pagecache's own default.
func defaultHostMemory(memoryMax string) size {
	return max(size(hostMemory(memoryMax)/hostShare)&^(1<<20-1), pagecache.DefaultHostMemory)
}

// hostMemory is the memory that this process may use at most, in bytes.
func hostMemory(memoryMax string) int64 {
	var machine unix.Sysinfo_t
	if unix.Sysinfo(&machine) != nil {
		return availableMemory()
	}
	most := int64(machine.Totalram) * int64(machine.Unit)
	// In a container the limit is that of its control group.
	if text, err := os.ReadFile(memoryMax); err == nil {
		if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			most = min(most, limit)
		}
	}
	return most
}

// emulatedMemory shares half of the available host memory among n devices, within reasonable bounds.
func emulatedMemory(available int64, n int) int64 {
	const least, most = 64 << 20, 4 << 30
	return min(max(available/2/int64(n), least), most)
}

// availableMemory is what programs can have without swapping, in bytes; a careful guess where the kernel does not say.
func availableMemory() int64 {
	const guess = 1 << 30
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return guess
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemAvailable:" {
			if kib, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return kib << 10
			}
		}
	}
	return guess
}
