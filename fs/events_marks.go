package fs

import (
	"encoding/binary"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// mostMarks limits how many files are watched. Each costs about a kilobyte of kernel memory and keeps its inode in
	// memory.
	mostMarks = 16384
	// mostInotify is the limit for inotify, whose quota the daemon shares with the user's other programs.
	mostInotify = 1024
	// youngFor is how long a file must be open before it is watched. Most files are closed sooner and need no mark.
	youngFor = 100 * time.Millisecond
	// mostYoung limits how many open files wait to be watched. Files beyond the limit are never watched.
	mostYoung = 4096
)

// mark is a file that is watched, is about to be, or was.
type mark struct {
	key     inodeKey // immutable
	witness *witness // immutable
	// id is the name that events give the file, "" if there is none. Only start and the goroutine that set ending
	// change it, with events.mu held.
	id string
	// users counts the calls of watch without unwatch. ending says that a goroutine is removing the kernel's mark; it
	// puts the mark back if users grows before it is done. Both are protected by events.mu.
	users  int
	ending bool
}

type youngFile struct {
	of    *openFile
	since time.Time
}

// watch makes events report changes of the file that fd is open on, until unwatch has been called as often. It returns
// nil if the file cannot be watched.
func (e *events) watch(fd int, k inodeKey, w *witness) *mark {
	if e.epoll == nil || k.dev != e.root.dev {
		return nil
	}
	e.mu.Lock()
	if m := e.marks[k]; m != nil {
		defer e.mu.Unlock()
		if e.closed || m.witness != w {
			return nil // the witness belongs to an earlier file with this inode number
		}
		m.users++
		return m
	}
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	m := &mark{key: k, witness: w, users: 1}
	full := len(e.marks) >= e.most
	if !full {
		e.marks[k] = m
	}
	e.mu.Unlock()
	var err error = unix.ENOSPC
	if !full {
		err = e.start(m, fd)
	}
	if err == nil {
		w.events.Store(e)
		return m
	}
	e.mu.Lock()
	again := e.refused
	e.refused = true
	e.mu.Unlock()
	if !again {
		e.log.Info("no events for a file of SOURCE, and perhaps for others: changes are noticed by their attributes",
			"events", e.kind, "inode", k.ino, "error", err)
	}
	if full {
		return nil
	}
	return m // others may use it by now; it has no id
}

// start puts a new mark on its file, which fd is open on.
func (e *events) start(m *mark, fd int) error {
	id, err := e.identify(fd)
	if err != nil {
		return err
	}
	name := func(id string) {
		e.mu.Lock()
		defer e.mu.Unlock()
		m.id = id
		e.named[id] = m
	}
	if id != "" {
		name(id) // before the first event comes
	}
	if id, err = e.begin(fd, id); err == nil && m.id == "" {
		name(id)
	}
	return err
}

// unwatch undoes one call of watch. fd is open on the same file.
func (e *events) unwatch(m *mark, fd int) {
	if m == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if m.users--; m.users > 0 || m.ending || e.closed {
		return
	}
	m.ending = true
	for m.users == 0 && m.id != "" {
		e.mu.Unlock()
		e.cease(fd, m.id)
		e.mu.Lock()
		if m.users == 0 {
			break
		}
		// watch was called in the meantime: put the mark back.
		e.mu.Unlock()
		id, err := e.begin(fd, m.id)
		e.mu.Lock()
		delete(e.named, m.id)
		if m.id = ""; err == nil {
			m.id, e.named[id] = id, m // inotify gives it another id
		}
		m.witness.told.Store(e.kind == EventsFanotify) // the file was unwatched for a moment
	}
	m.ending = false
	if m.users > 0 {
		return
	}
	delete(e.marks, m.key)
	if e.named[m.id] == m {
		delete(e.named, m.id)
	}
}

// identify returns the id that events will give the file of fd. For inotify it is "": begin returns the id.
func (e *events) identify(fd int) (string, error) {
	if e.kind == EventsInotify {
		return "", nil
	}
	h, _, err := unix.NameToHandleAt(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return "", err
	}
	id := slices.Clone(e.fsid[:])
	id = binary.NativeEndian.AppendUint32(id, uint32(h.Size()))
	id = binary.NativeEndian.AppendUint32(id, uint32(h.Type()))
	return string(append(id, h.Bytes()...)), nil
}

func fsidOf(st *unix.Statfs_t) (id [8]byte) {
	binary.NativeEndian.PutUint32(id[:], uint32(st.Fsid.Val[0]))
	binary.NativeEndian.PutUint32(id[4:], uint32(st.Fsid.Val[1]))
	return id
}

// begin asks the kernel for events of the file that fd is open on, and returns the id that they will give the file.
func (e *events) begin(fd int, id string) (string, error) {
	if e.kind == EventsInotify {
		wd, err := unix.InotifyAddWatch(e.fd, procPath(fd), unix.IN_MODIFY)
		return strconv.Itoa(wd), err
	}
	return id, unix.FanotifyMark(e.fd, unix.FAN_MARK_ADD, unix.FAN_MODIFY, unix.AT_FDCWD, procPath(fd))
}

// cease undoes begin. It fails if the file is gone, and the mark with it.
func (e *events) cease(fd int, id string) {
	if e.kind == EventsInotify {
		wd, _ := strconv.Atoi(id)
		_, _ = unix.InotifyRmWatch(e.fd, uint32(wd))
		return
	}
	_ = unix.FanotifyMark(e.fd, unix.FAN_MARK_REMOVE, unix.FAN_MODIFY, unix.AT_FDCWD, procPath(fd))
}

// opened queues of to be watched once it has been open for youngFor.
func (e *events) opened(of *openFile) {
	if e.epoll == nil || of.node.key.dev != e.root.dev {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.young) < mostYoung {
		if e.young = append(e.young, youngFile{of, time.Now()}); len(e.young) == 1 {
			e.wakeUp()
		}
	}
}

// watchOld watches the files that have been open for youngFor, and reports whether others still wait.
func (e *events) watchOld() (left bool) {
	e.mu.Lock()
	n := 0
	for n < len(e.young) && time.Since(e.young[n].since) >= youngFor {
		n++
	}
	old := e.young[:n:n]
	e.young = slices.Clone(e.young[n:])
	left = len(e.young) > 0
	e.mu.Unlock()
	for _, y := range old {
		if !y.of.use() {
			continue
		}
		if y.of.mark == nil { // only this goroutine sets it
			y.of.mark = e.watch(y.of.fd, y.of.node.key, y.of.content.witness)
		}
		y.of.mu.RUnlock()
	}
	return left
}
