package main

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// hostShare: by default, base copies may take one part in hostShare of the machine's memory. That is enough for
// programs that write a file of a few GiB on several devices, and too little to disturb other programs.
const hostShare = 16

// leastHostMemory is the smallest value of --host-memory.
const leastHostMemory = 1 << 20

// cgroupLimit is a file with the memory limit of this process's control group (cgroup v2, memory.max).
const cgroupLimit = "/sys/fs/cgroup/memory.max"

// pinnedShare times defaultHostMemory may be pinned for what does not fit on devices.
const pinnedShare = 4

// defaultHostMemory is a sixteenth of the memory that this process may use, and at least pagecache's own default.
func defaultHostMemory(memoryMax string) size {
	return max(size(hostMemory(memoryMax)/hostShare)&^(1<<20-1), pagecache.DefaultHostMemory)
}

// hostMemory returns the memory that this process may use at most, in bytes.
func hostMemory(memoryMax string) int64 {
	var machine unix.Sysinfo_t
	if unix.Sysinfo(&machine) != nil {
		return availableMemory()
	}
	most := int64(machine.Totalram) * int64(machine.Unit)
	// In a container, the limit of its control group applies.
	if text, err := os.ReadFile(memoryMax); err == nil {
		if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			most = min(most, limit)
		}
	}
	return most
}

// emulatedMemory divides half of the available host memory among n devices, within bounds.
func emulatedMemory(available int64, n int) int64 {
	const least, most = 64 << 20, 4 << 30
	return min(max(available/2/int64(n), least), most)
}

// availableMemory returns how much memory programs can get without swapping, in bytes. If the kernel does not say, it
// returns a careful guess.
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
