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

// With Options.KernelOpens, the kernel opens files and directories of a read-only mount itself. The first OPEN and the
// first OPENDIR are answered with ENOSYS, and the kernel does not ask again. It checks permissions as always, and keeps
// the pages of files and the entries of directories from one open to the next.
//
// So the daemon does not know what is open, and requests name no handle. They use an open of the daemon's own. All
// requests of a file share it, and it is closed when it was idle for a while. A change in SOURCE cannot be found at an
// open. The kernel learns of it from an event (tree.go), or when it asks for attributes again (freshen).
//
// The mount may be made writable later, by mount(8) with -o remount,rw. Every change is still refused (read_only.go).
// But then the kernel allows opens for writing by users who may not read the file, so no more grants are given.

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
	m    map[*node]*keptOpen // protected by mu
	idle int                 // opens in m without users; protected by mu
}

// keptOpen is the daemon's open of a file or of a directory.
type keptOpen struct {
	file   *openFile // immutable, as is dir; exactly one of them is set
	dir    *openDir
	users  int  // protected by keptShard.mu
	recent bool // used since opens were last closed; protected by keptShard.mu
}

func (k *keptOpen) close() {
	if k.file != nil {
		k.file.close()
	} else {
		k.dir.close()
	}
}

func (o *keptOpens) shard(n *node) *keptShard { return &o.shards[uint64(n.id)%shardCount] }

// get returns the open of n, and calls open if there is none. The open stays until done is called. Two concurrent
// callers may both call open.
func (o *keptOpens) get(n *node, open func() (*keptOpen, syscall.Errno)) (*keptOpen, syscall.Errno) {
	s := o.shard(n)
	s.mu.Lock()
	k := s.useLocked(n)
	s.mu.Unlock()
	if k != nil {
		return k, 0
	}
	fresh, errno := open()
	if errno != 0 {
		return nil, errno
	}
	s.mu.Lock()
	if k = s.useLocked(n); k == nil {
		if s.m == nil {
			s.m = make(map[*node]*keptOpen)
		}
		k, fresh.users, fresh.recent = fresh, 1, true
		s.m[n] = k
	}
	var surplus []*keptOpen
	if s.idle > o.limit {
		surplus = s.takeLocked(func(*keptOpen) bool { return true })
	}
	s.mu.Unlock()
	if k != fresh {
		surplus = append(surplus, fresh)
	}
	for _, unused := range surplus {
		unused.close()
	}
	return k, 0
}

func (s *keptShard) useLocked(n *node) *keptOpen {
	k := s.m[n]
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
func (s *keptShard) takeLocked(which func(*keptOpen) bool) (taken []*keptOpen) {
	for n, k := range s.m {
		if k.users == 0 && which(k) {
			delete(s.m, n)
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
	if k.users--; k.users == 0 {
		s.idle++
	}
	s.mu.Unlock()
}

// closeIdle closes the opens that were not used since its last call.
func (o *keptOpens) closeIdle() {
	for i := range o.shards {
		s := &o.shards[i]
		s.mu.Lock()
		old := s.takeLocked(func(k *keptOpen) bool {
			was := k.recent
			k.recent = false
			return !was
		})
		s.mu.Unlock()
		for _, k := range old {
			k.close()
		}
	}
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
	if k := s.m[n]; k != nil {
		if k.file != nil {
			return []int{k.file.fd}
		}
		return []int{k.dir.fd}
	}
	return nil
}

// run closes idle opens until ctx ends.
func (o *keptOpens) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(keptFor):
			o.closeIdle()
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
func (fs *fileSystem) keptNode(header *fuse.InHeader, kind uint32) (*node, syscall.Errno) {
	if !fs.kernelOpens {
		return nil, syscall.EBADF
	}
	n := fs.node(header.NodeId)
	if n == nil {
		return nil, syscall.ESTALE
	}
	if n.kind != kind {
		return nil, syscall.EBADF
	}
	return n, 0
}

// useFile returns the file of a request. It stays open until done is called.
func (fs *fileSystem) useFile(header *fuse.InHeader, handle uint64) (usedFile, syscall.Errno) {
	if of := fs.files.get(handle); of != nil {
		return usedFile{openFile: of}, 0
	}
	n, errno := fs.keptNode(header, unix.S_IFREG)
	if errno != 0 {
		return usedFile{}, errno
	}
	ctx := newRequest(nil, &header.Caller)
	defer ctx.end()
	return fs.useKept(ctx, n, 0)
}

// useKept returns the daemon's own open of n, which stays open until done is called. The kernel may have pages of n
// locked for the caller, so it does not wait for the kernel to drop any. It waits for leases as openContent does,
// unless flags are O_NONBLOCK.
func (fs *fileSystem) useKept(ctx context.Context, n *node, flags int) (usedFile, syscall.Errno) {
	k, errno := fs.kept.get(n, func() (*keptOpen, syscall.Errno) {
		flags := flags | unix.O_RDONLY | unix.O_LARGEFILE
		fd, errno := fs.openContent(ctx, n, flags, false)
		if errno == syscall.ESTALE {
			fd, errno = fs.openContent(ctx, n, flags, true) // the name is gone, but programs may have the file open
		}
		if errno != 0 {
			return nil, errno
		}
		of, errno := fs.newKeptFile(n, fd)
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

// newKeptFile makes an openFile for useKept. It takes over fd, also if it fails.
func (fs *fileSystem) newKeptFile(n *node, fd int) (*openFile, syscall.Errno) {
	of := &openFile{fs: fs, node: n, content: n.content(), fd: fd, uid: fs.creator.uid, flags: unix.O_RDONLY}
	if errno := fs.enter(of); errno != 0 {
		unix.Close(fd)
		return nil, errno
	}
	of.content.opens.Add(1)
	of.content.opened.Store(of)
	return of, 0
}

// grantKept keeps u open for grantedFor after the request, so that a grant can be used. It returns EROFS if the mount
// was made writable.
func (fs *fileSystem) grantKept(u usedFile) syscall.Errno {
	if u.kept == nil {
		return 0
	}
	if m, err := mountOf(fs.mountpoint); err != nil || m.Type != Type || m.writable {
		return syscall.EROFS
	}
	s := fs.kept.shard(u.node)
	s.mu.Lock()
	u.kept.users++
	s.mu.Unlock()
	time.AfterFunc(grantedFor, u.done)
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
	n, errno := fs.keptNode(header, unix.S_IFDIR)
	if errno != 0 {
		return usedDir{}, errno
	}
	k, errno := fs.kept.get(n, func() (*keptOpen, syscall.Errno) {
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
	c.witness.see(st)
	if changes := c.witness.changes.Load(); c.dropped.Load() != changes {
		ctx := newRequest(cancel, who)
		defer ctx.end()
		select {
		case <-fs.apart(func() { fs.dropChanged(n, changes) }):
		case <-ctx.Done():
		}
	}
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
