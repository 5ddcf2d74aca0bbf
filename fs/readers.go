package fs

import (
	"bytes"
	"os"
	"strconv"
)

// unknownThread is the kernel's number for threads of another PID namespace.
const unknownThread = 0

// unknownPatience is how many rounds to wait for an unknown thread.
const unknownPatience = 50

// readers are threads whose READs were answered. The kernel wakes such a thread, and the thread itself unlocks the
// page. So it holds the lock of a page until it has run.
type readers struct {
	waiting map[uint32]int64 // each thread's run time when it was last looked at, in ns; -1 before the first look
	rounds  int
}

// haveRun reports whether all of the threads have run since their READs were answered. Call it once a round.
func (r *readers) haveRun() bool {
	r.rounds++
	for thread, before := range r.waiting {
		if thread == unknownThread {
			if r.rounds > unknownPatience {
				delete(r.waiting, thread)
			}
			continue
		}
		// A woken thread stays runnable until it runs. A thread that sleeps, or has ended, has run.
		ran, runnable := threadTime(thread)
		if !runnable || before >= 0 && ran != before {
			delete(r.waiting, thread)
			continue
		}
		r.waiting[thread] = ran
	}
	return len(r.waiting) == 0
}

// threadTime returns how long a thread has run, in ns, and whether it is runnable now (proc_pid_schedstat(5),
// proc_pid_stat(5)).
func threadTime(thread uint32) (ran int64, runnable bool) {
	number := strconv.FormatUint(uint64(thread), 10)
	if stat := procStat(number); len(stat) == 0 || stat[0] != 'R' {
		return 0, false
	}
	text, err := os.ReadFile("/proc/" + number + "/schedstat")
	if err != nil {
		return 0, true
	}
	first, _, _ := bytes.Cut(text, []byte(" "))
	ran, _ = strconv.ParseInt(string(first), 10, 64)
	return ran, true
}
