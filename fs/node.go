package fs

import (
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// nodeID is the kernel's number of a node. Numbers are never reused.
type nodeID uint64

const rootID nodeID = 1

// neverTold is node.told before the kernel is told a size.
const neverTold = -1

// inodeKey names an inode of the backing filesystems while the inode exists.
type inodeKey struct {
	dev, ino uint64
}

func (k inodeKey) fileID() pagecache.FileID { return pagecache.FileID{Dev: k.dev, Ino: k.ino} }

// identity tells an inode from a later one with the same number.
type identity struct {
	key   inodeKey
	birth unix.StatxTimestamp
	kind  uint32 // S_IFMT bits
}

// is reports whether i and who are the same inode. Births are compared if both are known: the kernel does not know the
// birth of a filesystem's root until its server was asked.
func (i identity) is(who identity) bool {
	unknown := unix.StatxTimestamp{}
	return i.key == who.key && i.kind == who.kind && (i.birth == who.birth || i.birth == unknown ||
		who.birth == unknown)
}

// locator says where to find a node again: a name in a directory. The zero locator is none.
type locator struct {
	parent *node
	name   string
}

// node is an inode of the mount.
//
// Invariants: fd >= 0 or where is set, unless a change made directly in SOURCE took the node's name (then requests get
// ESTALE). A descriptor is closed only while users is 0 and, before the node is dropped, only while where is set.
// Requests keep their node from being dropped; the daemon's own work does not. parent.kids counts the nodes whose where
// names parent.
type node struct {
	id nodeID
	identity

	// names is used in directories only; see the package comment.
	names sync.RWMutex

	mu      sync.Mutex
	fd      int     // -1 when closed; protected by mu
	users   int     // calls of hold without unhold; protected by mu
	where   locator // protected by mu, of directories by placing too; leaves (parent, name) only under parent.names
	recent  bool    // used since the clock hand last passed; protected by mu
	dropped bool    // not in the table any more; protected by mu
	removed bool    // lost its last name through the mount; protected by mu
	below   bool    // fd is on a mount below SOURCE, and n can be found by name; protected by mu

	slot int // place in descriptors.ring, -1 if not there; protected by descriptors.mu

	// handle is the type (4) and bytes of a file handle, see handles.go; nil if there is none.
	handle atomic.Pointer[string]

	strict atomic.Uint32 // how much stricter than our mount the mounts are on which the node was found

	lookups uint64 // the kernel's references; protected by the table's shard
	kids    int    // locators that name this node; protected by the table's shard

	// told is the size that the kernel knows or is about to know. It is larger while a request of the mount may make
	// the file longer. If the kernel goes by its own size (write-back), told may be less than that.
	told atomic.Int64
	// touching is the number of releases that are setting mtime through the mount.
	touching atomic.Int32

	data atomic.Pointer[content] // set once, for regular files, when first needed
}

// content is the state of a regular file that was opened, or that a device holds part of.
type content struct {
	// gate is read-locked around every change of home. Attach locks it to wait for changes that did not consult the
	// File.
	gate sync.RWMutex
	file atomic.Pointer[pagecache.File]

	witness *witness // immutable
	// dropped is the value of witness.changes up to which the kernel's pages were dropped.
	dropped atomic.Uint64
	hazard  hazard
	// pushing is read-locked while pages are pushed into the kernel's cache.
	pushing sync.RWMutex
	// noticing says that a goroutine is examining a foreign change of the file.
	noticing atomic.Bool
	// telling is held while the kernel is told a size that it did not know.
	telling sync.Mutex
	// writers is the number of opens that can write, if the daemon sees all opens (fileSystem.mayBeWritten). At 0 the
	// kernel has no dirty page: closing and unmapping write them home.
	writers atomic.Int32
	// ordinary is 1 more than the id of a user, other than the daemon's user, who has the file open for writing. It is
	// 0 if there is none.
	ordinary atomic.Uint64
	through  passthrough
	// filled says that a READ may have brought pages of the file into the kernel's cache.
	filled atomic.Bool

	// opens counts the opens. unlinked says that the file has opens but no name.
	opens    atomic.Int32
	unlinked atomic.Bool
	// refused is 1 more than the number of the last thread whose open was answered with ESTALE.
	refused atomic.Uint64

	// complained says that the log has a line about pages of the file that SOURCE did not take. The first open and each
	// fsync reset it.
	complained atomic.Bool

	// failure is the last error of the disk that fsync or a closed descriptor reported, if the daemon does not see
	// opens. syncing is read-locked by fsync then.
	failure atomic.Pointer[failedSync]
	syncing sync.RWMutex

	// opened is an open of the file, or nil. It may have been closed by now.
	opened atomic.Pointer[openFile]
}

// nobody is a user without rights.
const nobody = 65534

// storer returns the user whose right to space counts for stores into the kernel's pages of of, whose author is
// unknown. If several users may have the file open for writing, it is not the daemon's user, so that nobody else gets
// the space that is reserved for that user.
func (fs *fileSystem) storer(of *openFile) uint32 {
	if !fs.unseenOpens {
		return of.content.storer(fs.creator.uid)
	}
	var st unix.Stat_t
	if unix.Fstat(of.fd, &st) != nil {
		return nobody
	}
	const others = unix.S_IWGRP | unix.S_IWOTH // with an ACL, the group's bits are its mask
	if st.Uid == fs.creator.uid && st.Mode&others != 0 {
		return nobody
	}
	return st.Uid
}

// storer is fileSystem.storer if the daemon sees all opens.
func (c *content) storer(daemon uint32) uint32 {
	if u := c.ordinary.Load(); u != 0 {
		return uint32(u - 1)
	}
	return daemon
}

// live returns the File that requests must consult, or nil.
func (c *content) live() *pagecache.File {
	if f := c.file.Load(); f != nil && !f.Detached() {
		return f
	}
	return nil
}

// attach makes requests consult f until it is detached.
func (c *content) attach(f *pagecache.File) {
	c.file.Store(f)
	f.WhenDetached(func() { c.file.CompareAndSwap(f, nil) })
}

// content returns the node's content, making it on first use.
func (n *node) content() *content {
	if c := n.data.Load(); c != nil {
		return c
	}
	n.data.CompareAndSwap(nil, newContent(new(witness)))
	return n.data.Load()
}

// newContent returns the content of a file of which the kernel has no pages.
func newContent(w *witness) *content {
	c := &content{witness: w}
	c.dropped.Store(w.changes.Load())
	return c
}

func (n *node) isRegular() bool { return n.kind == unix.S_IFREG }

// hold returns an O_PATH descriptor of n, which stays open until unhold. It opens one if needed. The caller must not
// hold any node.names. ESTALE means that n is no longer where it was, and that no program has it open.
func (fs *fileSystem) hold(n *node) (int, syscall.Errno) {
	fd, errno := fs.holdByName(n)
	if errno == syscall.ESTALE && fs.followOpen(n) {
		return fs.holdByName(n)
	}
	return fd, errno
}

// holdByName is hold for a node that has a descriptor or a name.
func (fs *fileSystem) holdByName(n *node) (int, syscall.Errno) {
	for {
		n.mu.Lock()
		if n.fd >= 0 {
			n.users++
			n.recent = true
			fd := n.fd
			n.mu.Unlock()
			return fd, 0
		}
		where := n.where
		n.mu.Unlock()
		if where.parent == nil {
			return -1, syscall.ESTALE
		}
		parent, errno := fs.hold(where.parent)
		if errno != 0 {
			return -1, errno
		}
		fd, again, errno := fs.holdAt(n, where, parent)
		fs.unhold(where.parent)
		if errno != 0 {
			return -1, errno
		}
		if !again {
			fs.descriptors.trim()
			return fd, 0
		}
	}
}

// holdAt opens n at where; parent is the descriptor of where.parent. again reports that n moved or got a descriptor
// during the call.
func (fs *fileSystem) holdAt(n *node, where locator, parent int) (fd int, again bool, errno syscall.Errno) {
	fd, again, errno = fs.openNamed(n, where, parent, unix.O_PATH)
	if fd < 0 {
		return -1, again, errno
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fd >= 0 || n.dropped {
		unix.Close(fd)
		return -1, true, 0
	}
	fs.adoptLocked(n, fd)
	n.users++
	return fd, false, 0
}

// openNamed opens n at where; parent is the descriptor of where.parent. again reports that n moved during the call. The
// caller must not hold n.mu, so that callers of n.path never wait for a server that hangs.
func (fs *fileSystem) openNamed(n *node, where locator, parent, flags int) (fd int, again bool, errno syscall.Errno) {
	where.parent.names.RLock()
	defer where.parent.names.RUnlock()
	n.mu.Lock()
	moved := n.where != where
	n.mu.Unlock()
	if moved {
		return -1, true, 0
	}
	fd, errno = fs.openVerified(n, parent, where.name, flags)
	return fd, false, errno
}

// followOpen gives n a descriptor from a program's open of it or by its handle, after its name went away directly in
// SOURCE. It reports whether that worked. It looks at every open file, but that happens once for each file.
func (fs *fileSystem) followOpen(n *node) bool {
	for _, fd := range fs.opensOf(n) {
		// The open may end now, and its number be reused. The check here finds that, as openVerified would.
		path, err := fs.openat(unix.AT_FDCWD, procPath(fd), unix.O_PATH, 0)
		if err != nil {
			continue
		}
		var st unix.Statx_t
		if peek(path, "", &st) != nil || !n.is(identify(&st)) {
			unix.Close(path)
			continue
		}
		n.mu.Lock()
		if n.fd >= 0 || n.dropped {
			unix.Close(path)
		} else {
			fs.adoptLocked(n, path)
			n.below = false
		}
		n.mu.Unlock()
		return true
	}
	return fs.followHandle(n)
}

// opensOf returns the descriptors of the opens of n.
func (fs *fileSystem) opensOf(n *node) (fds []int) {
	fds = fs.kept.descriptorsOf(n)
	if n.kind == unix.S_IFDIR {
		for _, d := range fs.dirs.all() {
			if d.node == n {
				fds = append(fds, d.fd)
			}
		}
		return fds
	}
	for _, of := range fs.files.all() {
		if of.node == n {
			fds = append(fds, of.fd)
		}
	}
	return fds
}

// adoptLocked makes fd the node's descriptor. The caller holds n.mu, and n has no descriptor.
func (fs *fileSystem) adoptLocked(n *node, fd int) {
	var st unix.Statx_t
	n.below = peek(fd, "", &st) == nil && st.Mnt_id != fs.mount
	n.fd = fd
	n.recent = true
	fs.descriptors.add(n)
	if n.below {
		fs.descriptors.addBelow(n)
	}
}

// unhold undoes one hold. The last unhold of a dropped node closes its descriptor.
func (fs *fileSystem) unhold(n *node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.users--; n.dropped {
		fs.closeUnusedLocked(n)
	}
}

// closeUnusedLocked closes the node's descriptor if there is one without users. The caller holds n.mu.
func (fs *fileSystem) closeUnusedLocked(n *node) {
	if n.fd >= 0 && n.users == 0 {
		unix.Close(n.fd)
		n.fd = -1
		fs.descriptors.remove(n)
	}
}

// openVerified opens name in the directory dir, without following it, and checks that it is n. With O_PATH it asks no
// server except that of the directory's filesystem.
func (fs *fileSystem) openVerified(n *node, dir int, name string, flags int) (int, syscall.Errno) {
	fd, err := fs.openat(dir, name, flags|unix.O_NOFOLLOW, 0)
	if err != nil {
		if err == syscall.ENOENT || err == syscall.ELOOP || err == syscall.ENOTDIR {
			return -1, syscall.ESTALE
		}
		return -1, toErrno(err)
	}
	var st unix.Statx_t
	if err := peek(fd, "", &st); err != nil || !n.is(identify(&st)) {
		unix.Close(fd)
		return -1, syscall.ESTALE
	}
	return fd, 0
}

// openat opens name relative to dir, with O_CLOEXEC. If descriptors have run out, it closes idle ones and tries again.
func (fs *fileSystem) openat(dir int, name string, flags int, mode uint32) (int, error) {
	return fs.opened(func() (int, error) { return unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode) })
}

// opened calls open, which opens a descriptor, as openat says.
func (fs *fileSystem) opened(open func() (int, error)) (int, error) {
	for tries := 0; ; {
		fd, err := open()
		switch {
		case err == nil:
			return fd, nil
		case err == syscall.EINTR:
		case (err == syscall.EMFILE || err == syscall.ENFILE) && tries < 3:
			closed := fs.descriptors.shed()
			if fs.cache != nil && pagecache.CloseUnused(fs.cache) {
				closed = true
			}
			if !closed {
				return -1, err
			}
			tries++
		default:
			return -1, err
		}
	}
}

// mayHang reports whether n is on a filesystem mounted below SOURCE, whose server may hang even if SOURCE's does not.
// That server is never asked for n while names is held.
func (fs *fileSystem) mayHang(n *node) bool { return n.key.dev != fs.root.key.dev }

// stat fills st for n. It avoids opening n if it can.
func (fs *fileSystem) stat(n *node, st *unix.Statx_t) syscall.Errno {
	for {
		n.mu.Lock()
		where := n.where
		if n.fd >= 0 || where.parent == nil || fs.mayHang(n) {
			n.mu.Unlock()
			fd, errno := fs.hold(n)
			if errno != 0 {
				return errno
			}
			defer fs.unhold(n)
			return toErrno(statx(fd, "", st))
		}
		n.mu.Unlock()
		again, errno := fs.statAt(n, where, st)
		if errno == syscall.ESTALE && fs.followOpen(n) {
			continue
		}
		if !again {
			return errno
		}
	}
}

// statAt fills st for n at where. again reports that n moved during the call.
func (fs *fileSystem) statAt(n *node, where locator, st *unix.Statx_t) (again bool, errno syscall.Errno) {
	parent, errno := fs.hold(where.parent)
	if errno != 0 {
		return false, errno
	}
	defer fs.unhold(where.parent)
	where.parent.names.RLock()
	defer where.parent.names.RUnlock()
	n.mu.Lock()
	moved := n.where != where
	n.mu.Unlock()
	if moved {
		return true, 0
	}
	switch err := statx(parent, where.name, st); {
	case err == syscall.ENOENT || err == syscall.ENOTDIR:
		return false, syscall.ESTALE
	case err != nil:
		return false, toErrno(err)
	case !n.is(identify(st)):
		return false, syscall.ESTALE
	}
	return false, 0
}

// path returns n's current path below the root, for people to read.
func (n *node) path() string {
	var names []string
	for n != nil && n.id != rootID {
		n.mu.Lock()
		where := n.where
		n.mu.Unlock()
		if where.parent == nil {
			names = append(names, "(deleted)")
			break
		}
		names = append(names, where.name)
		n = where.parent
	}
	size := 0
	for _, name := range names {
		size += len(name) + 1
	}
	p := make([]byte, 0, size)
	for i := len(names) - 1; i >= 0; i-- {
		p = append(p, names[i]...)
		if i > 0 {
			p = append(p, '/')
		}
	}
	return string(p)
}
