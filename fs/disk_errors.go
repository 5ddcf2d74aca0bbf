package fs

import (
	"bytes"
	"errors"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel writes SOURCE's pages to the disk later. If that fails, fsync reports it, once to each descriptor that was
// open then, and not at all if nothing had the file open and the kernel has forgotten it. If the daemon does not see
// opens, it has other descriptors than programs do:
//
//   - Programs share its descriptors. So an error that fsync reported is remembered, and each process that was running
//     then is told once, by its next fsync.
//   - Its descriptors are closed when they are idle, and programs keep theirs. So of a file that was written, it keeps
//     one for reading for errorsFor: longer than the kernel keeps dirty pages, unless the disk is slower than that. One
//     for writing would keep SOURCE from running the file.

// errorsFor is how long errors of the disk are awaited after a file was written. By default the kernel writes a page
// after 30 s, and looks for such pages every 5 s.
const errorsFor = time.Minute

// mostLate is how many descriptors are kept at most.
const mostLate = 4096

// failedSync is an error of the disk.
type failedSync struct {
	errno syscall.Errno
	at    time.Duration // since the machine started

	mu   sync.Mutex
	told map[int]struct{} // processes that know; protected by mu
}

// failed remembers an error of which the process knows, or nobody if it is 0.
func (c *content) failed(err error, process int) {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = syscall.EIO
	}
	f := &failedSync{errno: errno, at: sinceBoot(), told: make(map[int]struct{})}
	if process != 0 {
		f.told[process] = struct{}{}
	}
	c.failure.Store(f)
}

// owed returns the error that the thread's process has not been told of.
func (c *content) owed(thread uint32) error {
	f := c.failure.Load()
	if f == nil {
		return nil
	}
	process, started := processOf(thread)
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.told[process]; ok || started > f.at {
		return nil
	}
	f.told[process] = struct{}{}
	return f.errno
}

// syncKept is fsync of a file by a thread whose open the daemon does not know.
func (fs *fileSystem) syncKept(of *openFile, thread, flags uint32) error {
	c := of.content
	err := func() error {
		c.syncing.RLock()
		defer c.syncing.RUnlock()
		err := syncDescriptor(of.fd, flags)
		if late := fs.late.look(of.node); err == nil {
			err = late
		}
		if err != nil {
			process, _ := processOf(thread)
			c.failed(err, process)
		}
		return err
	}()
	if err != nil {
		return err
	}
	// An fsync at the same time may have got the error of this one.
	c.syncing.Lock()
	//lint:ignore SA2001 nothing is guarded; the point is to have waited
	c.syncing.Unlock()
	return c.owed(thread)
}

// errorOn returns an error of the disk that descriptor fd has not reported. It waits for nothing: there are no pages
// in the range.
func errorOn(fd int) error {
	const farOut = 1<<63 - 1<<20
	err := unix.SyncFileRange(fd, farOut, 1, unix.SYNC_FILE_RANGE_WAIT_BEFORE)
	if err == syscall.EIO || err == syscall.ENOSPC {
		return err
	}
	return nil
}

// lateErrors are the descriptors that are kept for the errors of the disk.
type lateErrors struct {
	limit int // immutable
	mu    sync.Mutex
	m     map[*node]lateError // protected by mu
}

type lateError struct {
	fd    int // open for reading
	until time.Time
}

// await keeps a descriptor for errors of the file of, which was written and is about to be closed.
func (l *lateErrors) await(of *openFile) {
	n, fs := of.node, of.fs
	if h := n.handle.Load(); h == nil || h == noHandle {
		return // what is mounted below SOURCE can be unmounted
	}
	if err := errorOn(of.fd); err != nil {
		of.content.failed(err, 0)
	}
	until := time.Now().Add(errorsFor)
	l.mu.Lock()
	e, ok := l.m[n]
	if ok {
		l.m[n] = lateError{e.fd, until}
	}
	full := len(l.m) >= l.limit
	l.mu.Unlock()
	if ok || full {
		return
	}
	fd, err := fs.openat(fs.procDir, strconv.Itoa(of.fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_LARGEFILE, 0)
	if err != nil {
		return
	}
	l.mu.Lock()
	if _, ok = l.m[n]; !ok {
		if l.m == nil {
			l.m = make(map[*node]lateError)
		}
		l.m[n] = lateError{fd, until}
	}
	l.mu.Unlock()
	if ok {
		unix.Close(fd)
	}
	n.mu.Lock()
	dropped := n.dropped
	n.mu.Unlock()
	if dropped {
		l.forget(n)
	}
}

// look returns an error of n that was not returned before.
func (l *lateErrors) look(n *node) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.m[n]; ok {
		return errorOn(e.fd)
	}
	return nil
}

// forget closes the descriptor of n.
func (l *lateErrors) forget(n *node) {
	l.mu.Lock()
	e, ok := l.m[n]
	delete(l.m, n)
	l.mu.Unlock()
	if ok {
		unix.Close(e.fd) // without the lock: it may end the file, for which SOURCE may need its disk
	}
}

// sweep closes the descriptors of files that were written long before now, or that lost their last name.
func (l *lateErrors) sweep(now time.Time) {
	var old []int
	l.mu.Lock()
	for n, e := range l.m {
		var st unix.Stat_t
		removed := unix.Fstat(e.fd, &st) == nil && st.Nlink == 0 && !n.isRemoved()
		if !removed && now.Before(e.until) {
			continue
		}
		if err := errorOn(e.fd); err != nil {
			n.content().failed(err, 0)
		}
		old = append(old, e.fd)
		delete(l.m, n)
	}
	l.mu.Unlock()
	for _, fd := range old {
		unix.Close(fd) // as in forget
	}
}

// sinceBoot returns the time since the machine started.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // cannot fail
	return time.Duration(ts.Nano())
}

// processOf returns the number of a thread's process, and when it started, since the machine started. It returns 0 if
// it cannot see the thread.
func processOf(thread uint32) (process int, started time.Duration) {
	const ticks = 100 // per second, for programs on all machines with Linux
	number, ok := procStatus(strconv.FormatUint(uint64(thread), 10), "Tgid:")
	if !ok || !ownProc() {
		return 0, 0
	}
	process, _ = strconv.Atoi(number)
	const startTime = 22 - 3 // after the state
	fields := bytes.Fields(procStat(number))
	if len(fields) <= startTime {
		return process, 0
	}
	at, _ := strconv.ParseUint(string(fields[startTime]), 10, 64)
	return process, time.Duration(at) * (time.Second / ticks)
}
