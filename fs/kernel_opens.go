package fs

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// With Options.KernelOpens, the kernel opens files and directories itself. The first OPEN and the first OPENDIR are
// answered with ENOSYS, and the kernel does not ask again. It checks permissions as always, and keeps the pages of
// files and the entries of directories from one open to the next.
//
// So the daemon does not know what is open, and requests name no handle. They use an open of the daemon's own: one for
// reading, and one for reading and writing. All requests of a file share these, and they are closed when they were idle
// for a while. A change in SOURCE cannot be found at an open. The kernel learns of it from an event (tree.go), or when
// it asks for attributes again (freshen).
//
// After ENOSYS, the kernel sends no RELEASE either, not even for an open that CREATE made. So CREATE answers with
// handle 0, and leaves its descriptor here.
//
// On a writable mount (fileSystem.unseenOpens), any program may have any file open, mapped and stored into until
// FORGET:
//
//   - A file that loses its last name through the mount keeps its descriptor until FORGET (unlinked.go).
//   - A file that is renamed in SOURCE is found by its file handle (handles.go).
//   - Whoever asks for a grant shows a descriptor (showing.go).
//
// A read-only mount may be made writable later, by mount(8) with -o remount,rw. Every change is still refused
// (read_only.go). But then the kernel allows opens for writing by users who may not read the file, so no more grants
// are given.

// keptFor is the interval at which idle opens are closed. An idle open lasts one or two intervals.
const keptFor = time.Second

// grantedFor is how long an open lasts at least after a grant for it: longer than a grant.
const grantedFor = time.Minute

// keptOpens are the daemon's opens of files and directories.
type keptOpens struct {
	limit  int // limit of idle opens in each shard; immutable
	shards [shardCount]keptShard
}

type keptShard struct {
	mu   sync.Mutex
	m    map[keptKey]*keptOpen // protected by mu
	idle int                   // opens in m without users; protected by mu
}

// keptKey names an open: of a node, for reading or for reading and writing.
type keptKey struct {
	n     *node
	write bool
}

// keptOpen is the daemon's open of a file or of a directory.
type keptOpen struct {
	file   *openFile // immutable, as is dir; exactly one of them is set
	dir    *openDir
	users  int  // protected by keptShard.mu
	grants int  // users that are grants; protected by keptShard.mu
	closed bool // out of its shard in spite of its users, which are grants; protected by keptShard.mu
	recent bool // used since opens were last closed; protected by keptShard.mu
}

func (k *keptOpen) close() {
	if k.file != nil {
		k.file.close()
	} else {
		k.dir.close()
	}
}

// retire is close for a file that programs may have open.
func (k *keptOpen) retire() {
	if k.file != nil && k.file.wrote.Load() {
		k.file.fs.late.await(k.file)
	}
	k.close()
}

func (o *keptOpens) shard(n *node) *keptShard { return &o.shards[uint64(n.id)%shardCount] }

// get returns the open of key, and calls open if there is none. The open stays until done is called. Two concurrent
// callers may both call open.
func (o *keptOpens) get(key keptKey, open func() (*keptOpen, syscall.Errno)) (*keptOpen, syscall.Errno) {
	s := o.shard(key.n)
	s.mu.Lock()
	k := s.useLocked(key)
	s.mu.Unlock()
	if k != nil {
		return k, 0
	}
	fresh, errno := open()
	if errno != 0 {
		return nil, errno
	}
	s.mu.Lock()
	if k = s.useLocked(key); k == nil {
		if s.m == nil {
			s.m = make(map[keptKey]*keptOpen)
		}
		k, fresh.users, fresh.recent = fresh, 1, true
		s.m[key] = k
	}
	var surplus []*keptOpen
	if s.idle > o.limit {
		surplus = s.takeLocked(func(keptKey, *keptOpen) bool { return true })
	}
	s.mu.Unlock()
	if k != fresh {
		surplus = append(surplus, fresh)
	}
	for _, unused := range surplus {
		unused.retire()
	}
	return k, 0
}

func (s *keptShard) useLocked(key keptKey) *keptOpen {
	k := s.m[key]
	if k == nil {
		return nil
	}
	if k.users++; k.users == 1 {
		s.idle--
	}
	k.recent = true
	return k
}

// takeLocked removes and returns the idle opens that which accepts.
func (s *keptShard) takeLocked(which func(keptKey, *keptOpen) bool) (taken []*keptOpen) {
	for key, k := range s.m {
		if k.users == 0 && which(key, k) {
			delete(s.m, key)
			s.idle--
			taken = append(taken, k)
		}
	}
	return taken
}

// done ends the use of an open that get returned for n.
func (o *keptOpens) done(n *node, k *keptOpen) {
	s := o.shard(n)
	s.mu.Lock()
	if k.users--; k.users == 0 && !k.closed {
		s.idle++
	}
	s.mu.Unlock()
}

// closeIdle closes the opens that were not used since its last call.
func (o *keptOpens) closeIdle() {
	for i := range o.shards {
		s := &o.shards[i]
		s.mu.Lock()
		old := s.takeLocked(func(_ keptKey, k *keptOpen) bool {
			was := k.recent
			k.recent = false
			return !was
		})
		s.mu.Unlock()
		for _, k := range old {
			k.retire()
		}
	}
}

// forget closes the opens of n that no request uses. Grants for them are void then.
func (o *keptOpens) forget(n *node) {
	for _, write := range []bool{false, true} {
		if k := o.take(keptKey{n, write}); k != nil {
			k.close()
		}
	}
}

// drop closes one open of a file that programs may have open, unless a request uses it.
func (o *keptOpens) drop(key keptKey) {
	if k := o.take(key); k != nil {
		k.retire()
	}
}

// take returns an open that no request uses, for its caller to close it, or nil.
func (o *keptOpens) take(key keptKey) *keptOpen {
	s := o.shard(key.n)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.m[key]
	if k == nil || k.users > k.grants {
		return nil
	}
	delete(s.m, key)
	if k.users == 0 {
		s.idle--
	}
	k.closed = true
	return k
}

// closeAll closes all opens, also those with a grant. No request may be under way.
func (o *keptOpens) closeAll() {
	for i := range o.shards {
		s := &o.shards[i]
		s.mu.Lock()
		all := s.m
		s.m, s.idle = nil, 0
		s.mu.Unlock()
		for _, k := range all {
			k.close()
		}
	}
}

// descriptorsOf returns the descriptors of the daemon's open of n, if there is one.
func (o *keptOpens) descriptorsOf(n *node) (fds []int) {
	s := o.shard(n)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, write := range []bool{false, true} {
		k := s.m[keptKey{n, write}]
		switch {
		case k == nil:
		case k.file != nil:
			fds = append(fds, k.file.fd)
		default:
			fds = append(fds, k.dir.fd)
		}
	}
	return fds
}

// closeIdle closes idle opens until ctx ends.
func (fs *fileSystem) closeIdle(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(keptFor):
			fs.kept.closeIdle()
			fs.late.sweep(time.Now())
		}
	}
}

// keptUse is a request's use of an open of the daemon's own. It is zero if the request uses a program's open.
type keptUse struct {
	kept *keptOpen
	of   *keptOpens
	n    *node
}

// done ends the use.
func (u keptUse) done() {
	if u.kept != nil {
		u.of.done(u.n, u.kept)
	}
}

// usedFile is an open file that a request uses.
type usedFile struct {
	*openFile
	keptUse
}

// keptNode returns the node of a request without a handle. The node must be of the given kind.
func (fs *fileSystem) keptNode(id uint64, kind uint32) (*node, syscall.Errno) {
	if !fs.kernelOpens {
		return nil, syscall.EBADF
	}
	n := fs.node(id)
	if n == nil {
		return nil, syscall.ESTALE
	}
	if n.kind != kind {
		return nil, syscall.EBADF
	}
	return n, 0
}

// useFile returns the file of a request that reads. It stays open until done is called.
func (fs *fileSystem) useFile(header *fuse.InHeader, handle uint64) (usedFile, syscall.Errno) {
	return fs.useFileOf(header, header.NodeId, handle, false)
}

// useFileToWrite is useFile for a request that changes bytes. The kernel has checked that the program's open can write.
func (fs *fileSystem) useFileToWrite(header *fuse.InHeader, handle uint64) (usedFile, syscall.Errno) {
	return fs.useFileOf(header, header.NodeId, handle, true)
}

// useFileToSync is useFile for fsync. It uses the open through which the file was written, if there is one: only that
// one is sure to report errors of the disk.
func (fs *fileSystem) useFileToSync(header *fuse.InHeader, handle uint64) (usedFile, syscall.Errno) {
	if n := fs.node(header.NodeId); fs.unseenOpens && n != nil {
		s := fs.kept.shard(n)
		s.mu.Lock()
		k := s.useLocked(keptKey{n, true})
		s.mu.Unlock()
		if k != nil {
			return usedFile{k.file, keptUse{k, &fs.kept, n}}, 0
		}
	}
	return fs.useFile(header, handle)
}

// useFileOf returns the file of a request on the node id.
func (fs *fileSystem) useFileOf(header *fuse.InHeader, id, handle uint64, write bool) (usedFile, syscall.Errno) {
	if of := fs.files.get(handle); of != nil {
		return usedFile{openFile: of}, 0
	}
	n, errno := fs.keptNode(id, unix.S_IFREG)
	if errno != 0 {
		return usedFile{}, errno
	}
	ctx := newRequest(nil, &header.Caller)
	defer ctx.end()
	used, errno := fs.useKept(ctx, keptKey{n, write}, 0)
	if errno == 0 && write {
		used.wrote.Store(true)
	}
	return used, errno
}

// useKept returns the daemon's own open of key, which stays open until done is called. The kernel may have pages of the
// file locked for the caller, so it does not wait for the kernel to drop any. It waits for leases as openContent does,
// unless flags are O_NONBLOCK.
func (fs *fileSystem) useKept(ctx context.Context, key keptKey, flags int) (usedFile, syscall.Errno) {
	n := key.n
	k, errno := fs.kept.get(key, func() (*keptOpen, syscall.Errno) {
		fd, appendOnly, errno := fs.openKept(ctx, key, flags)
		if errno != 0 {
			return nil, errno
		}
		of, errno := fs.newKeptFile(n, fd, appendOnly)
		if errno != 0 {
			return nil, errno
		}
		if changes, err := of.content.witness.look(fd); err == nil && of.content.dropped.Load() != changes {
			fs.background.Go(func() { fs.dropChanged(n, changes) })
		}
		return &keptOpen{file: of}, 0
	})
	if errno != 0 {
		return usedFile{}, errno
	}
	return usedFile{k.file, keptUse{k, &fs.kept, n}}, 0
}

// openKept opens the file of key for useKept. appendOnly reports that the file allows only appending.
func (fs *fileSystem) openKept(ctx context.Context, key keptKey, flags int) (fd int, appendOnly bool, _ syscall.Errno) {
	open := func(flags int) (int, syscall.Errno) {
		fd, errno := fs.openContent(ctx, key.n, flags, false)
		if errno == syscall.ESTALE {
			fd, errno = fs.openContent(ctx, key.n, flags, true) // the name is gone, but programs may have the file open
		}
		return fd, errno
	}
	flags |= unix.O_LARGEFILE
	if !key.write {
		fd, errno := open(flags | unix.O_RDONLY)
		return fd, false, errno
	}
	fd, errno := open(flags | unix.O_RDWR)
	if errno == syscall.EPERM {
		fd, errno = open(flags | unix.O_RDWR | unix.O_APPEND)
		return fd, true, errno
	}
	return fd, false, errno
}

// newKeptFile makes an openFile for useKept. It takes over fd, also if it fails. The openFile does not count as a
// writer: who writes is not known (content.writable).
func (fs *fileSystem) newKeptFile(n *node, fd int, appendOnly bool) (*openFile, syscall.Errno) {
	of := &openFile{fs: fs, node: n, content: n.content(), fd: fd, uid: fs.creator.uid, flags: unix.O_RDONLY,
		appendOnly: appendOnly}
	if errno := fs.enter(of); errno != 0 {
		unix.Close(fd)
		return nil, errno
	}
	if of.content.opens.Add(1) == 1 {
		of.content.complained.Store(false)
	}
	of.content.opened.Store(of)
	return of, 0
}

// keepCreated keeps fd, which is open for reading and writing on the new file n, for the requests of its creator.
// It takes over fd.
func (fs *fileSystem) keepCreated(n *node, fd int) syscall.Errno {
	of, errno := fs.newKeptFile(n, fd, false)
	if errno != 0 {
		return errno
	}
	k, _ := fs.kept.get(keptKey{n, true}, func() (*keptOpen, syscall.Errno) { return &keptOpen{file: of}, 0 })
	if k.file != of {
		of.close() // of an earlier file that cannot be told from n
	}
	fs.kept.done(n, k)
	return 0
}

// grantKept keeps u open for grantedFor after the request, so that a grant can be used. It returns EROFS if a read-only
// mount was made writable.
func (fs *fileSystem) grantKept(u usedFile) syscall.Errno {
	if u.kept == nil {
		return 0
	}
	if m, err := mountOf(fs.mountpoint); fs.readOnly && (err != nil || m.Type != Type || m.writable) {
		return syscall.EROFS
	}
	s := fs.kept.shard(u.node)
	s.mu.Lock()
	u.kept.users++
	u.kept.grants++
	s.mu.Unlock()
	time.AfterFunc(grantedFor, func() {
		s.mu.Lock()
		u.kept.grants--
		s.mu.Unlock()
		u.done()
	})
	return 0
}

// usedDir is an open directory that a request uses.
type usedDir struct {
	*openDir
	keptUse
}

// useDir returns the directory of a request. It stays open until done is called.
func (fs *fileSystem) useDir(header *fuse.InHeader, handle uint64) (usedDir, syscall.Errno) {
	if d := fs.dirs.get(handle); d != nil {
		return usedDir{openDir: d}, 0
	}
	n, errno := fs.keptNode(header.NodeId, unix.S_IFDIR)
	if errno != 0 {
		return usedDir{}, errno
	}
	k, errno := fs.kept.get(keptKey{n: n}, func() (*keptOpen, syscall.Errno) {
		d, err := fs.openDirectory(n, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return nil, toErrno(err)
		}
		return &keptOpen{dir: d}, 0
	})
	if errno != 0 {
		return usedDir{}, errno
	}
	return usedDir{k.dir, keptUse{k, &fs.kept, n}}, 0
}

// openDirectory opens the directory n with flags. The open has no handle.
func (fs *fileSystem) openDirectory(n *node, flags int) (*openDir, error) {
	fd, errno := fs.hold(n)
	if errno != 0 {
		return nil, errno
	}
	defer fs.unhold(n)
	opened, err := fs.openat(fs.procDir, strconv.Itoa(fd), flags, 0)
	if err == syscall.EPERM && flags&unix.O_NOATIME != 0 {
		opened, err = fs.openat(fs.procDir, strconv.Itoa(fd), flags&^unix.O_NOATIME, 0)
	}
	if err != nil {
		return nil, err
	}
	return &openDir{node: n, fd: opened}, nil
}

// freshen is called before the kernel is told the attributes st of n. It does nothing unless the kernel opens files
// itself. If the file was changed directly in SOURCE, the kernel's pages are dropped first. A request whose thread is
// being killed does not wait for that.
func (fs *fileSystem) freshen(cancel <-chan struct{}, who *fuse.Caller, n *node, st *unix.Statx_t) {
	if !fs.kernelOpens {
		return
	}
	c := n.data.Load()
	if c == nil {
		return
	}
	fs.compare(n, c, st)
	if changes := c.witness.changes.Load(); c.dropped.Load() != changes {
		ctx := newRequest(cancel, who)
		defer ctx.end()
		select {
		case <-fs.apart(func() { fs.dropChanged(n, changes) }):
		case <-ctx.Done():
		}
	}
}

// compare notices a change in SOURCE. st are the attributes of n, or were until a moment ago. On a writable mount they
// may be from before a write that has ended since, so before they count as changed, they are asked for again. It may be
// called with names locked.
func (fs *fileSystem) compare(n *node, c *content, st *unix.Statx_t) {
	if fs.unseenOpens {
		if c.witness.agrees(st) {
			return
		}
		if fd, errno := fs.openHandle(n, unix.O_PATH); errno == 0 {
			defer unix.Close(fd)
			_, _ = c.witness.look(fd)
			return
		}
	}
	c.witness.see(st)
}

// dropChanged makes devices look at home, and the kernel drop its pages of n, after the given number of changes in
// SOURCE. It is called in the background, because the file may be locked as long as home does not answer.
func (fs *fileSystem) dropChanged(n *node, changes uint64) {
	c := n.content()
	fs.changed.Add(1)
	if f := c.live(); f != nil {
		if _, err := f.CheckHome(context.Background()); err != nil {
			fs.log.Warn("a file that changed in SOURCE could not be examined", "node", n.path(), "error", err)
			return
		}
	}
	if err := fs.invalidate(n, 0, -1); err != nil {
		fs.log.Warn("the kernel's pages of a file that changed in SOURCE could not be dropped", "node", n.path(), "error", err)
		return
	}
	raise(&c.dropped, changes)
}

// raise sets x to v if it is less.
func raise(x *atomic.Uint64, v uint64) {
	for {
		old := x.Load()
		if old >= v || x.CompareAndSwap(old, v) {
			return
		}
	}
}
