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

// events report what others do to files of SOURCE that a device holds, or that have been open on the mount for a while.
// They improve on attributes in two ways: a change by others is noticed even while the mount is changing the file
// itself, and a file that was read on the mount and grows in SOURCE shows its new size within milliseconds.
//
// They come from fanotify, which says who made the change. Where the kernel or SOURCE does not allow that, they come
// from inotify, which does not say so: then they only make files grow. Stores through mmap in SOURCE cause no events,
// nor do changes that other machines make to a network filesystem. So attributes are compared as well, and nothing
// depends on events: a file that cannot be watched, or a queue that overflows, costs only what events add.
//
// Only files of SOURCE's own filesystem are watched, and only where that is a local one: no system call here waits for
// a server. None is made with mu held.
//
// Events are read when a witness looks. Otherwise they are read after a rest, because the mount's own writes cause
// events too, and the kernel merges them meanwhile.
type events struct {
	kind   string // EventsFanotify, EventsInotify or EventsOff; immutable
	root   inodeKey
	fsid   [8]byte // of SOURCE's filesystem, as fanotify names it; immutable
	most   int     // files that are watched at most; immutable
	log    *slog.Logger
	notice func(k inodeKey) // called for each file that may have been changed; does not block
	file   *os.File         // nil without events
	fd     int              // that of file
	wake   chan struct{}
	rested chan struct{} // has an element when run has read what was there
	stop   chan struct{}
	ended  sync.WaitGroup
	// overflows counts how often the kernel dropped events.
	overflows atomic.Int64

	reading sync.Mutex            // comes before mu
	changed map[inodeKey]struct{} // files that notice has yet to be called for; protected by reading
	done    bool                  // fd is closed; protected by reading

	mu      sync.Mutex
	marks   map[inodeKey]*mark // protected by mu
	named   map[string]*mark   // by the name that events give the file; protected by mu
	young   []youngFile        // protected by mu
	closed  bool               // protected by mu
	refused bool               // some file could not be watched; protected by mu
}

// What Options.Events may be. Server.Events returns one of them, but not EventsAuto.
const (
	EventsAuto     = "auto" // the first of fanotify, inotify and off that works
	EventsAll      = "all"  // EventsAuto, and the tree, where that is possible
	EventsFanotify = "fanotify"
	EventsInotify  = "inotify"
	EventsOff      = "off"
)

// eventsRest is the pause after events were read.
const eventsRest = 10 * time.Millisecond

// newEvents opens a source of events, for a SOURCE whose root is open as fd.
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
		log.Info("this kernel or SOURCE gives no events of this kind", "events", kind, "error", err)
	}
	if e.kind == EventsOff {
		return e
	}
	e.file = os.NewFile(uintptr(e.fd), e.kind)
	e.ended.Go(e.wait)
	e.ended.Go(e.run)
	return e
}

// open tries one kind. It marks root for a moment: some filesystems have no handles, which fanotify needs.
func (e *events) open(kind string, root int) (err error) {
	if mayBeRemote(root) {
		return errors.New("SOURCE may have a server, which would not report what others do there")
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
	return nil
}

// close ends it. Marks may still be given back.
func (e *events) close() {
	if e.file == nil {
		return
	}
	close(e.stop)
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.reading.Lock()
	e.done = true
	e.file.Close()
	e.reading.Unlock()
	e.ended.Wait()
}

// wait wakes run when events are there.
func (e *events) wait() {
	raw, err := e.file.SyscallConn()
	for err == nil {
		// What became readable before Read is not told again: so the file is asked.
		err = raw.Read(func(fd uintptr) bool { return readable(int(fd)) })
		e.wakeUp()
		select {
		case <-e.stop:
			return
		case <-e.rested:
		}
	}
}

// readable reports whether fd can be read. If that cannot be found out, whoever reads finds out why.
func readable(fd int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
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

// run reads events while no witness looks, and watches files that stay open.
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

// drain reads all events that are there. Changes that others made before drain was called are noted when it returns.
func (e *events) drain() {
	if e.file == nil {
		return
	}
	e.reading.Lock()
	defer e.reading.Unlock()
	var buf [4096]byte
	for !e.done {
		n, err := unix.Read(e.fd, buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		e.take(buf[:n])
	}
	if len(e.changed) > 0 {
		e.wakeUp()
	}
}

// take notes what events say. reading is held.
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
				e.log.Warn("the kernel dropped events of SOURCE: all files that are watched count as changed once",
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

// noteLocked notes that a file was changed. With foreign set, the mount did not do it. reading is held too.
func (e *events) noteLocked(m *mark, foreign bool) {
	if m == nil {
		return
	}
	if foreign {
		m.witness.told.Store(true)
	}
	e.changed[m.key] = struct{}{}
}

// noticed tells the kernel the size of a file that grew in SOURCE.
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
