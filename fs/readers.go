package fs

import (
	"bytes"
	"os"
	"strconv"
)

// unknownThread is the number that the kernel gives for threads of another PID namespace.
const unknownThread = 0

// unknownPatience is how many rounds an unknown thread is waited for.
const unknownPatience = 50

// readers are threads whose READs were answered. Each holds the lock of a page until it has run: the kernel wakes it,
// and it unlocks the page itself.
type readers struct {
	waiting map[uint32]int64 // the time that the thread had run when it was first looked at; -1 before
	rounds  int
}

// haveRun reports whether all of them have run since their READs were answered. It is asked once a round.
func (r *readers) haveRun() bool {
	r.rounds++
	for thread, before := range r.waiting {
		if thread == unknownThread {
			if r.rounds > unknownPatience {
				delete(r.waiting, thread)
			}
			continue
		}
		// A thread that was woken can be run until it runs. One that sleeps, or has ended, has run.
		ran, runnable := threadTime(thread)
		if !runnable || before >= 0 && ran != before {
			delete(r.waiting, thread)
			continue
		}
		r.waiting[thread] = ran
	}
	return len(r.waiting) == 0
}

// threadTime returns how long a thread has run, in ns, and whether it could run now (proc_pid_schedstat(5),
// proc_pid_stat(5)).
func threadTime(thread uint32) (ran int64, runnable bool) {
	dir := "/proc/" + strconv.FormatUint(uint64(thread), 10)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return 0, false
	}
	// The name, in brackets, may have any characters.
	if end := bytes.LastIndexByte(stat, ')'); end < 0 || end+2 >= len(stat) || stat[end+2] != 'R' {
		return 0, false
	}
	text, err := os.ReadFile(dir + "/schedstat")
	if err != nil {
		return 0, true
	}
	first, _, _ := bytes.Cut(text, []byte(" "))
	ran, _ = strconv.ParseInt(string(first), 10, 64)
	return ran, true
}
