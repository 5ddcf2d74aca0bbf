package fs

import (
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// events reports changes made directly in SOURCE to files that a device holds, or that have been open on the mount for
// a while. Events improve on attributes in two ways. A foreign change is noticed even while the mount changes the same
// file. And a file that was read on the mount and grows in SOURCE shows its new size within milliseconds.
//
// Events come from fanotify, which says who made the change. If the kernel or SOURCE does not allow fanotify, they come
// from inotify, which does not say who: then they only make files grow. Stores through mmap in SOURCE cause no events,
// and neither do changes that other machines make to a network filesystem. So attributes are compared as well, and
// nothing depends on events: a file that cannot be watched, or a queue that overflows, costs only what events add.
//
// Only files of SOURCE's own filesystem are watched, and only if it is a local one, so no system call here waits for a
// server. None is made with mu held.
//
// Events are read when a witness looks. Otherwise they are read after a pause, because the mount's own writes cause
// events too, and the kernel merges them during the pause.
type events struct {
	kind   string // EventsFanotify, EventsInotify or EventsOff; immutable
	root   inodeKey
	fsid   [8]byte // the id of SOURCE's filesystem in fanotify events; immutable
	most   int     // limit of watched files; immutable
	log    *slog.Logger
	notice func(k inodeKey) // called for each file that may have changed; does not block
	fd     int              // has the events; immutable
	// epoll is an epoll instance that waits for one event of fd at a time. Go's poller waits for epoll. If it waited
	// for fd, each event would wake a thread, and each write to a watched file causes one. Nil without events.
	epoll  *os.File
	wake   chan struct{}
	rested chan struct{} // has an element when run has read the pending events
	stop   chan struct{}
	ended  sync.WaitGroup
	// overflows counts how often the kernel dropped events.
	overflows atomic.Int64

	reading sync.Mutex            // comes before mu
	buf     [4096]byte            // what is read; protected by reading
	changed map[inodeKey]struct{} // files that notice is still to be called for; protected by reading
	done    bool                  // fd is closed; protected by reading

	mu      sync.Mutex
	marks   map[inodeKey]*mark // protected by mu
	named   map[string]*mark   // by the id that events give the file; protected by mu
	young   []youngFile        // protected by mu
	closed  bool               // protected by mu
	refused bool               // a file could not be watched, and the log says so; protected by mu
}

// Values of Options.Events. Server.Events returns one of them, never EventsAuto.
const (
	EventsAuto     = "auto" // the first of fanotify, inotify and off that works
	EventsAll      = "all"  // EventsAuto and, if possible, events of the whole tree
	EventsFanotify = "fanotify"
	EventsInotify  = "inotify"
	EventsOff      = "off"
)

// eventsRest is the pause after events were read.
const eventsRest = 10 * time.Millisecond

// newEvents starts reading events of the SOURCE whose root is open as fd.
func newEvents(choice string, root inodeKey, fd int, log *slog.Logger, notice func(inodeKey)) *events {
	e := &events{
		kind: EventsOff, root: root, most: mostMarks, log: log, notice: notice, fd: -1,
		wake: make(chan struct{}, 1), rested: make(chan struct{}, 1), stop: make(chan struct{}),
		changed: make(map[inodeKey]struct{}), marks: make(map[inodeKey]*mark), named: make(map[string]*mark),
	}
	if choice == EventsOff || choice == "" {
		return e
	}
	for _, kind := range []string{EventsFanotify, EventsInotify} {
		if choice != kind && choice != EventsAuto && choice != EventsAll {
			continue
		}
		err := e.open(kind, fd)
		if err == nil {
			if e.kind = kind; kind == EventsInotify {
				e.most = mostInotify
			}
			break
		}
		log.Info("the kernel or SOURCE does not provide events of this kind", "events", kind, "error", err)
	}
	if e.kind == EventsOff {
		return e
	}
	e.ended.Go(e.wait)
	e.ended.Go(e.run)
	return e
}

// open tries one kind of events. It marks root for a moment, because some filesystems lack the handles that fanotify
// needs.
func (e *events) open(kind string, root int) (err error) {
	if mayBeRemote(root) {
		return errors.New("SOURCE may be on a network filesystem, which does not report changes by other machines")
	}
	if kind == EventsFanotify {
		var st unix.Statfs_t
		if err := unix.Fstatfs(root, &st); err != nil {
			return err
		}
		e.fsid = fsidOf(&st)
		const flags = unix.FAN_CLASS_NOTIF | unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_REPORT_FID
		e.fd, err = unix.FanotifyInit(flags, unix.O_RDONLY)
	} else {
		e.fd, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	}
	if err != nil {
		return err
	}
	try := &events{kind: kind, fd: e.fd, fsid: e.fsid}
	id, err := try.identify(root)
	if err == nil {
		id, err = try.begin(root, id)
	}
	if err != nil {
		unix.Close(e.fd)
		e.fd = -1
		return err
	}
	try.cease(root, id)
	if e.epoll, err = epollOf(e.fd); err != nil {
		unix.Close(e.fd)
		e.fd = -1
	}
	return err
}

// epollOf returns an epoll instance for fd, which does not wait for events yet.
func epollOf(fd int) (*os.File, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLONESHOT})
	if err == nil {
		err = unix.SetNonblock(epoll, true) // so that Go's poller takes it
	}
	if err != nil {
		unix.Close(epoll)
		return nil, err
	}
	return os.NewFile(uintptr(epoll), "epoll"), nil
}

// close ends reading events and waits for it. unwatch may still be called.
func (e *events) close() {
	if e.epoll == nil {
		return
	}
	close(e.stop)
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.reading.Lock()
	e.done = true
	e.epoll.Close()
	unix.Close(e.fd)
	e.reading.Unlock()
	e.ended.Wait()
}

// wait wakes run when there are events to read.
func (e *events) wait() {
	raw, err := e.epoll.SyscallConn()
	for err == nil {
		var armed error
		if err = raw.Control(func(epoll uintptr) { armed = e.arm(int(epoll)) }); err == nil {
			err = armed
		}
		if err == nil {
			err = raw.Read(func(epoll uintptr) bool { return ready(int(epoll)) })
		}
		e.wakeUp()
		select {
		case <-e.stop:
			return
		case <-e.rested:
		}
	}
}

// arm makes epoll wait for the next event, or report at once that there is one.
func (e *events) arm(epoll int) error {
	return unix.EpollCtl(epoll, unix.EPOLL_CTL_MOD, e.fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT})
}

// ready reports whether the awaited event has come. Then epoll no longer waits.
func ready(epoll int) bool {
	var got [1]unix.EpollEvent
	for {
		n, err := unix.EpollWait(epoll, got[:], 0)
		if err != unix.EINTR {
			return n > 0 || err != nil
		}
	}
}

func (e *events) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// run reads events while no witness looks, and starts to watch files that stay open.
func (e *events) run() {
	var later <-chan time.Time
	for {
		select {
		case <-e.stop:
			return
		case <-e.wake:
		case <-later:
		}
		e.drain()
		e.reading.Lock()
		changed := e.changed
		e.changed = make(map[inodeKey]struct{})
		e.reading.Unlock()
		for k := range changed {
			e.notice(k)
		}
		if later = nil; e.watchOld() {
			later = time.After(youngFor)
		}
		select {
		case <-e.stop:
			return
		case <-time.After(eventsRest):
		}
		select {
		case e.rested <- struct{}{}:
		default:
		}
	}
}

// drain reads all pending events. When it returns, all foreign changes made before the call are noted.
func (e *events) drain() {
	if e.epoll == nil {
		return
	}
	e.reading.Lock()
	defer e.reading.Unlock()
	for !e.done {
		n, err := unix.Read(e.fd, e.buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		e.take(e.buf[:n])
		if n <= len(e.buf)/2 {
			break // another event would have fitted
		}
	}
	if len(e.changed) > 0 {
		e.wakeUp()
	}
}

// take notes the changes that events report. The caller holds reading.
func (e *events) take(b []byte) {
	parse := parseFanotify
	if e.kind == EventsInotify {
		parse = parseInotify
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for ev := range parse(b) {
		switch {
		case ev.overflow:
			// Any file may have changed.
			if e.overflows.Add(1) == 1 {
				e.log.Warn("the kernel dropped events of SOURCE: every watched file counts as changed once",
					"events", e.kind)
			}
			for _, m := range e.marks {
				e.noteLocked(m, true)
			}
		case !ev.own:
			e.noteLocked(e.named[ev.id], e.kind == EventsFanotify)
		}
	}
}

// noteLocked notes that a file was changed. foreign says that the mount did not do it. The caller also holds reading.
func (e *events) noteLocked(m *mark, foreign bool) {
	if m == nil {
		return
	}
	if foreign {
		m.witness.told.Store(true)
	}
	e.changed[m.key] = struct{}{}
}

// noticed tells the kernel the new size of a file that grew in SOURCE.
func (fs *fileSystem) noticed(k inodeKey) {
	n := fs.table.byInode(k)
	if n == nil {
		return
	}
	c := n.data.Load()
	if c == nil || !c.filled.Load() || !c.noticing.CompareAndSwap(false, true) {
		return
	}
	fs.background.Go(func() {
		defer c.noticing.Store(false)
		of := fs.openOf(n, c)
		if of == nil {
			return
		}
		var st unix.Statx_t
		err := statx(of.fd, "", &st)
		of.mu.RUnlock()
		if err == nil && int64(st.Size) > n.told.Load() {
			fs.tellSize(n, &st)
		}
	})
}
