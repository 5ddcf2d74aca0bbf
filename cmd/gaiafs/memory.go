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

// defaultHostMemory is a sixteenth of the memory that this process may use, and no less than pagecache's own default.
func defaultHostMemory(memoryMax string) size {
	var machine unix.Sysinfo_t
	if unix.Sysinfo(&machine) != nil {
		return pagecache.DefaultHostMemory
	}
	most := int64(machine.Totalram) * int64(machine.Unit)
	// In a container the limit is that of its control group.
	if text, err := os.ReadFile(memoryMax); err == nil {
		if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			most = min(most, limit)
		}
	}
	return max(size(most/hostShare)&^(1<<20-1), pagecache.DefaultHostMemory)
}
