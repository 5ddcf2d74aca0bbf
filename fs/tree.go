package fs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// tree reports every change in SOURCE's filesystem to the kernel, by fanotify. So the kernel may keep names and
// attributes for watchedTimeout. tree is used if the kernel opens files itself (kernel_opens.go), and with
// Options.Events "all".
//
// On a writable mount, the daemon's own changes of names are left out, because the kernel asked for them. Its changes
// of files are not, because some are made without a request: the daemon writes home what devices released.
//
// When a change is reported, an older answer may be on its way to the kernel, and arrive later. So the kernel is told
// once more after againAfter.
//
// The kernel drops events if the filesystem changes faster than they are read. Then the tree is given up: everything
// counts as changed once, and timeouts become those of other mounts.
//
// Other filesystems mounted below SOURCE are not watched (but see below.go), and stores through mmap in SOURCE cause no
// events.
type tree struct {
	fs    *fileSystem
	file  *os.File // the fanotify descriptor
	root  int      // descriptor of SOURCE
	plain bool     // handles of SOURCE's filesystem begin with the inode number, see inodeIn; immutable
	alive atomic.Bool
	// given says that close was called. ended is closed when the goroutine has ended.
	given atomic.Bool
	ended chan struct{}
}

const (
	watchedTimeout = time.Minute
	againAfter     = time.Second
	// treeRest is the pause after reading events, in which the kernel merges the events of a file.
	treeRest = 5 * time.Millisecond
	// mostAgain limits the changes that the kernel is told of a second time.
	mostAgain = 1 << 16
)

// treeMask is the set of events to ask for.
const treeMask = unix.FAN_MODIFY | unix.FAN_ATTRIB | unix.FAN_ONDIR | treeNames

// treeNames are the events that change a directory.
const treeNames = unix.FAN_CREATE | unix.FAN_DELETE | unix.FAN_MOVED_FROM | unix.FAN_MOVED_TO

// treeChange is one event.
type treeChange struct {
	mask   uint64
	own    bool   // this process made the change
	handle string // of the file, or of the directory if name is set: type (4) and bytes of a file handle
	name   string
}

// narrow keeps only what tells changes apart, so that equal changes are reported once. ok is false if c is redundant:
// another change of the same event covers it, or the kernel itself asked for it.
func (t *tree) narrow(c treeChange) (_ treeChange, ok bool) {
	names := c.mask & treeNames
	if own := c.own && !t.fs.readOnly; own || names == 0 {
		if c.name != "" || own && c.mask&treeMask&^(treeNames|unix.FAN_ONDIR) == 0 {
			return c, false
		}
		names = 0
	}
	foreign := uint64(0)
	if t.fs.unseenOpens && !c.own && c.name == "" {
		foreign = c.mask & unix.FAN_MODIFY
	}
	return treeChange{mask: names | foreign, handle: c.handle, name: c.name}, true
}

// openTree watches SOURCE's filesystem. It needs root, and a filesystem with file handles.
func openTree(fs *fileSystem) (*tree, error) {
	if fs.remote {
		return nil, errors.New("SOURCE may be on a network filesystem, which does not report changes by other machines")
	}
	root, err := unix.Open(procPath(fs.root.fd), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	const flags = unix.FAN_CLASS_NOTIF | unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_REPORT_FID |
		unix.FAN_REPORT_DFID_NAME
	plain := false
	fd, err := unix.FanotifyInit(flags, unix.O_RDONLY)
	if err == nil {
		if err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, treeMask, root, "."); err == nil {
			plain, err = tryHandles(root)
		}
		if err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		unix.Close(root)
		return nil, err
	}
	t := &tree{fs: fs, file: os.NewFile(uintptr(fd), "fanotify"), root: root, plain: plain, ended: make(chan struct{})}
	t.alive.Store(true)
	return t, nil
}

// watchTree watches SOURCE's filesystem if that was asked for and is possible. With passthrough on a writable mount it
// is not: writes past the daemon look like foreign changes.
// A writable mount whose files the kernel opens cannot do without.
func (fs *fileSystem) watchTree(o *Options) error {
	asked := o.KernelOpens || o.Events == EventsAll && (o.ReadOnly || !o.Passthrough)
	if !asked || o.unwatched {
		return nil
	}
	t, err := openTree(fs)
	switch {
	case err == nil:
		fs.tree = t
	case fs.unseenOpens:
		return &NoEvents{err}
	default:
		o.Log.Info("no events report changes in SOURCE: the kernel sees them when it asks again", "error", err)
	}
	return nil
}

// NoEvents is the error of Mount if the kernel is to open the files of a writable mount itself, and no events report
// what happens in Source.
type NoEvents struct{ err error }

// Error implements error.
func (e *NoEvents) Error() string {
	return fmt.Sprintf("the kernel can open the files of a writable mount only if events report all changes in SOURCE, "+
		"and there are none (%v): mount as root, with SOURCE on a local filesystem that has file handles, or mount "+
		"read-only, or let the daemon open the files", e.err)
}

// Unwrap returns why there are no events.
func (e *NoEvents) Unwrap() error { return e.err }

// tryHandles opens a directory by its handle, to see that this works. plain reports whether inodeIn understands the
// filesystem's handles.
func tryHandles(root int) (plain bool, err error) {
	h, _, err := unix.NameToHandleAt(root, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return false, err
	}
	fd, err := unix.OpenByHandleAt(root, h, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	ino, ok := inodeIn(h.Type(), string(h.Bytes()))
	return ok && ino == st.Ino, nil
}

// inodeIn returns the inode number at the beginning of a handle of ext4 and, for small numbers, of XFS. Handles of
// other filesystems may look the same, so use it only if it is right for SOURCE's root.
func inodeIn(kind int32, handle string) (ino uint64, ok bool) {
	const inodeAndGeneration = 1 // FILEID_INO32_GEN
	if kind != inodeAndGeneration || len(handle) != 8 {
		return 0, false
	}
	return uint64(binary.NativeEndian.Uint32([]byte(handle))), true
}

// close stops watching and waits for the goroutine. root stays open. t may be nil.
func (t *tree) close() {
	if t == nil {
		return
	}
	t.given.Store(true)
	t.alive.Store(false)
	t.file.Close()
	<-t.ended
}

// again is a change that the kernel is told of a second time.
type again struct {
	at     time.Time
	change treeChange
}

// run tells the kernel of changes until close is called or events are lost.
func (t *tree) run() {
	defer close(t.ended)
	var later []again
	buf := make([]byte, 64<<10)
	for {
		wait := time.Time{}
		if len(later) > 0 {
			wait = later[0].at
		}
		_ = t.file.SetReadDeadline(wait)
		n, err := t.file.Read(buf)
		switch {
		case t.given.Load():
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			t.giveUp("events of SOURCE cannot be read", err)
			return
		}
		seen := make(map[treeChange]struct{})
		for c := range parseTree(buf[:max(n, 0)]) {
			if c.mask&unix.FAN_Q_OVERFLOW != 0 {
				t.giveUp("SOURCE's filesystem changes faster than its events can be read", nil)
				return
			}
			if c, ok := t.narrow(c); ok {
				seen[c] = struct{}{}
			}
		}
		now := time.Now()
		for c := range seen {
			if t.tell(c) && len(later) < mostAgain {
				c.mask &^= unix.FAN_MODIFY // only attributes may be on their way
				later = append(later, again{now.Add(againAfter), c})
			}
		}
		for len(later) > 0 && !later[0].at.After(now) {
			t.tell(later[0].change)
			later = later[1:]
		}
		if n > 0 {
			time.Sleep(treeRest)
		}
	}
}

// tell tells the kernel of a change. It returns false if the change is of a file that the kernel does not know.
func (t *tree) tell(c treeChange) bool {
	n, names := t.find(c.handle)
	if n == nil {
		return false
	}
	if c.name != "" {
		t.fs.expire(n, c.name)
		return true
	}
	if c.mask&unix.FAN_MODIFY != 0 { // attributes may not show it, if the mount changes the file too
		if content := n.data.Load(); content != nil {
			content.witness.told.Store(true)
		}
	}
	t.fs.refresh(n)
	if names == 0 && n.isRegular() {
		t.fs.notify.letGo(n)
	}
	return true
}

// expire makes the kernel look up a name in a directory again, and drop what it has cached of the directory.
func (fs *fileSystem) expire(n *node, name string) {
	fs.notify.EntryNotify(uint64(n.id), name)
	fs.notify.InodeNotify(uint64(n.id), 0, -1)
}

// refresh makes the kernel drop the attributes of n. If the kernel opens files itself, it also drops changed pages; on
// other mounts, an open looks at SOURCE.
func (fs *fileSystem) refresh(n *node) {
	fs.notify.InodeNotify(uint64(n.id), -1, 0)
	c := n.data.Load()
	if c == nil || !fs.kernelOpens {
		return
	}
	var st unix.Statx_t
	if errno := fs.stat(n, &st); errno != 0 {
		return // removed: only programs that have it open can see the kernel's pages
	}
	fs.compare(n, c, &st)
	if changes := c.witness.changes.Load(); c.dropped.Load() != changes {
		fs.dropChanged(n, changes)
	}
}

// find returns the node of a file handle, or nil, and the number of the file's names. Most events are of files that the
// mount does not know. They cost no system call if the handle contains the inode number.
func (t *tree) find(handle string) (n *node, names uint32) {
	if len(handle) < 4 {
		return nil, 0
	}
	kind := int32(binary.NativeEndian.Uint32([]byte(handle)))
	ino, ok := inodeIn(kind, handle[4:])
	if t.plain && ok && t.fs.table.byInode(inodeKey{t.fs.root.key.dev, ino}) == nil {
		return nil, 0
	}
	h := unix.NewFileHandle(kind, []byte(handle[4:]))
	fd, err := unix.OpenByHandleAt(t.root, h, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return nil, 0 // it is gone: the event of its directory reports that
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if peek(fd, "", &st) != nil {
		return nil, 0
	}
	return t.fs.table.find(identify(&st)), st.Nlink
}

// giveUp stops reporting and goes back to timeouts. Everything counts as changed once.
func (t *tree) giveUp(why string, err error) {
	t.alive.Store(false)
	t.fs.log.Warn(why+": names and attributes are kept for --entry-timeout and --attr-timeout from now on", "error",
		err)
	for _, n := range t.fs.table.byID.all() {
		n.mu.Lock()
		where := n.where
		n.mu.Unlock()
		if where.parent != nil {
			t.fs.expire(where.parent, where.name)
		}
		t.fs.refresh(n)
	}
	t.fs.refresh(t.fs.root)
}

// keeps returns how long the kernel may cache n's attributes, or names in n. timeout is the mount's option.
func (fs *fileSystem) keeps(n *node, timeout time.Duration) time.Duration {
	if t := fs.tree; t != nil && t.alive.Load() && timeout == defaultTimeout && n.key.dev == fs.root.key.dev {
		return watchedTimeout
	}
	return timeout
}

// parseTree returns the changes in a buffer that was read from fanotify(7). An event may have several handles: then a
// name in a directory is one change, and the file another.
func parseTree(b []byte) iter.Seq[treeChange] {
	return func(yield func(treeChange) bool) {
		for le := binary.NativeEndian; len(b) >= unix.FAN_EVENT_METADATA_LEN; {
			size, from := int(le.Uint32(b)), int(le.Uint16(b[6:]))
			if size < unix.FAN_EVENT_METADATA_LEN || size > len(b) || from > size {
				return
			}
			mask, own, info := le.Uint64(b[8:]), int32(le.Uint32(b[20:])) == ownPID, b[from:size]
			b = b[size:]
			if mask&unix.FAN_Q_OVERFLOW != 0 && !yield(treeChange{mask: mask}) {
				return
			}
			for len(info) >= 4 {
				n := int(le.Uint16(info[2:]))
				if n < 4 || n > len(info) {
					break
				}
				if c, ok := parseInfo(info[0], info[4:n]); ok {
					if c.mask, c.own = mask, own; !yield(c) {
						return
					}
				}
				info = info[n:]
			}
		}
	}
}

// parseInfo parses a record after an event: a filesystem's number (8), the length of a handle (4), its type (4), its
// bytes and, if it is of a directory, a name that ends in 0.
func parseInfo(kind byte, info []byte) (c treeChange, ok bool) {
	const header = 16
	if len(info) < header || kind != unix.FAN_EVENT_INFO_TYPE_FID && kind != unix.FAN_EVENT_INFO_TYPE_DFID_NAME {
		return c, false
	}
	size := int64(binary.NativeEndian.Uint32(info[8:]))
	if size > int64(len(info)-header) {
		return c, false
	}
	c.handle = string(info[header-4 : header+size])
	if kind == unix.FAN_EVENT_INFO_TYPE_DFID_NAME {
		name := info[header+size:]
		for i, b := range name {
			if b == 0 {
				name = name[:i]
				break
			}
		}
		if c.name = string(name); c.name == "." {
			c.name = "" // the directory itself
		}
	}
	return c, true
}
