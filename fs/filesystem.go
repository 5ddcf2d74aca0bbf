package fs

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// notifier is the part of the FUSE server that notifies the kernel, see expiry.go.
type notifier interface {
	InodeNotify(node uint64, off int64, length int64) fuse.Status
	InodeNotifyStoreCache(node uint64, off int64, data []byte) fuse.Status
	// EntryNotify says that a name in a directory may lead to another file now.
	EntryNotify(parent uint64, name string) fuse.Status
	// letGo makes the kernel forget a file that has lost its last name, unless a program uses it.
	letGo(n *node)
}

// fileSystem serves the requests of one mount. The handlers are in lookup.go, attr.go and setattr.go, create.go,
// remove.go, dir.go, xattr.go; for open files in file.go, file_read.go, file_write.go, file_space.go and file_ioctl.go.
// read_only.go refuses what read-only mounts do not allow.
type fileSystem struct {
	fuse.RawFileSystem // answers ENOSYS to requests without a handler

	// Set before the first request, immutable.
	root         *node
	mount        uint64 // the kernel's number of SOURCE's mount, 0 if the kernel reports none
	procDir      int    // O_PATH descriptor of /proc/self/fd
	cache        *pagecache.Cache
	granter      Granter
	log          *slog.Logger
	creator      creator
	attrTimeout  time.Duration
	entryTimeout time.Duration
	writeBack    bool // in force, not only asked for
	made         time.Time
	readOnly     bool
	// kernelOpens says that the kernel opens files and directories itself (kernel_opens.go).
	kernelOpens bool
	mountpoint  string
	device      string // the mount's, major:minor
	idmapped    bool   // the mount may be idmapped (callers.go)
	// unseenOpens says that the kernel opens files itself and that programs may write: any file may be open for
	// writing.
	unseenOpens bool
	// remote says that SOURCE's filesystem may have a server: closing a file may return an error, and attributes that
	// the kernel has cached may be old.
	remote      bool
	withoutCure bool // for a test that shows why kernel_pages.go has a cure
	notify      notifier
	backing     kernelBacking
	strict      *strictMounts

	table       nodeTable
	witnesses   witnesses
	descriptors descriptors
	files       index[*openFile]
	dirs        index[*openDir]
	lastHandle  atomic.Uint64
	kept        keptOpens
	late        lateErrors
	ahead       *ahead
	tree        *tree // nil if it was not asked for, or SOURCE's filesystem cannot be watched; immutable

	// passes says that the kernel may read and write files itself, if no device uses them.
	passes  atomic.Bool
	refused atomic.Int64 // opens that the kernel did not let pass through
	// writeBackLost says that write-back was asked for and was given up for passthrough. Set before the first request,
	// immutable.
	writeBackLost bool

	// touching is read-locked while the daemon uses its own mount, because the mount is busy then.
	touching sync.RWMutex

	// events report changes in SOURCE. Immutable.
	events *events

	// unlinked counts files that have no name and are still open. freed has room for one element: the close of such a
	// file sends one.
	unlinked atomic.Int64
	freed    chan struct{}
	removed  removedFiles

	times [requestKinds]pagecache.Histogram // durations of requests, see timed

	background sync.WaitGroup // goroutines of apart, reap and others

	corrections atomic.Int64 // WRITEs that made the kernel drop pages again
	impatient   atomic.Int64 // waits for the kernel that were given up
	changed     atomic.Int64 // opens that found a change made directly in SOURCE
}

var _ fuse.RawFileSystem = (*fileSystem)(nil)

// newFileSystem opens o.Source. The caller calls close when no request is served any more.
func newFileSystem(o *Options) (*fileSystem, error) {
	creator, err := newCreator()
	if err != nil {
		return nil, err
	}
	fs := &fileSystem{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		cache:         o.Cache,
		granter:       o.Granter,
		log:           o.Log,
		creator:       creator,
		freed:         make(chan struct{}, 1),
		attrTimeout:   o.AttrTimeout,
		entryTimeout:  o.EntryTimeout,
		writeBack:     o.WriteBack,
		made:          time.Now(),
		readOnly:      o.ReadOnly,
		withoutCure:   o.withoutCure,
		mountpoint:    o.Mountpoint,
	}
	fs.descriptors.wake = make(chan struct{}, 1)
	if fs.descriptors.limit, err = raiseDescriptorLimit(); err != nil {
		return nil, err
	}
	fs.procDir, err = unix.Open("/proc/self/fd", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/proc/self/fd cannot be opened (%w): mount proc on /proc", err)
	}
	fd, err := unix.Open(o.Source, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(fs.procDir)
		return nil, err
	}
	var st unix.Statx_t
	if err := statx(fd, "", &st); err != nil {
		unix.Close(fd)
		unix.Close(fs.procDir)
		return nil, err
	}
	if fs.strict, err = newStrictMounts(o.strict); err != nil {
		unix.Close(fd)
		unix.Close(fs.procDir)
		return nil, fmt.Errorf("mounts cannot be listed (%w): mount proc on /proc", err)
	}
	fs.root, fs.mount = fs.table.refer(identify(&st), fs.joinCache), st.Mnt_id
	fs.root.fd = fd
	fs.root.users = 1 // never closed
	fs.remote = mayBeRemote(fd)
	fs.passes.Store(o.Passthrough)
	if o.KernelOpens {
		fs.kernelOpens, fs.unseenOpens = true, !o.ReadOnly
		fs.kept.limit = max(fs.descriptors.limit/8/shardCount, 1)
		fs.late.limit = min(fs.descriptors.limit/8, mostLate)
	}
	if err := fs.watchTree(o); err != nil {
		unix.Close(fs.root.fd)
		unix.Close(fs.procDir)
		fs.strict.close()
		return nil, err
	}
	fs.ahead = newAhead(fs)
	fs.events = newEvents(o.Events, fs.root.key, fd, o.Log, fs.noticed)
	return fs, nil
}

// close closes every descriptor and ends the background goroutines. No request may be under way.
func (fs *fileSystem) close() {
	fs.events.close()
	fs.tree.close()
	fs.background.Wait()
	fs.ahead.close()
	fs.kept.closeAll()
	fs.late.sweep(time.Now().Add(errorsFor))
	for _, of := range fs.files.all() {
		of.close()
	}
	for _, d := range fs.dirs.all() {
		d.close()
	}
	for _, n := range fs.table.byID.all() {
		n.mu.Lock()
		if n.fd >= 0 {
			unix.Close(n.fd)
			n.fd = -1
		}
		n.mu.Unlock()
	}
	if fs.tree != nil {
		unix.Close(fs.tree.root) // now that no file is opened by its handle
	}
	unix.Close(fs.procDir)
	fs.strict.close()
}

// served returns the handler of the mount's requests.
func (fs *fileSystem) served() fuse.RawFileSystem {
	if fs.readOnly {
		return timed{identified{readOnly{fs}}, fs}
	}
	return timed{identified{fs}, fs}
}

// String implements fuse.RawFileSystem.
func (fs *fileSystem) String() string { return "gaiafs" }

// Init implements fuse.RawFileSystem. It is called before any other request.
func (fs *fileSystem) Init(s *fuse.Server) {
	fs.backing = s
	offers := s.KernelSettings().Flags64()
	fs.idmapped = fs.idmapped && offers&fuse.CAP_ALLOW_IDMAP != 0
	if fs.writeBack && offers&fuse.CAP_WRITEBACK_CACHE == 0 {
		fs.writeBack = false
		fs.log.Warn("--write-back has no effect: the kernel does not support it")
	}
	if offers&fuse.CAP_PASSTHROUGH == 0 {
		fs.stopPassing("this kernel was built without passthrough")
	}
}

// raiseDescriptorLimit raises the process's limit of descriptors to the highest that is allowed; root may exceed its
// own hard limit. It returns how many descriptors nodes may keep. The others are for open files: programs that read a
// data set may have hundreds of thousands open.
func raiseDescriptorLimit() (int, error) {
	const enough = 1 << 20 // the default limit of Linux for a process (fs.nr_open)
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	for _, most := range []uint64{max(limit.Max, enough), limit.Max} {
		raised := syscall.Rlimit{Cur: most, Max: most}
		if limit.Cur >= most || syscall.Setrlimit(unix.RLIMIT_NOFILE, &raised) == nil {
			limit.Cur = max(limit.Cur, most)
			break
		}
	}
	return int(min(max(limit.Cur/2, 16), 1<<16)), nil
}

// mayBeRemote reports whether fd is on a filesystem that may have a server. Network filesystems write when a file is
// closed, and report errors then. On others, the kernel need not ask the daemon at each close.
func mayBeRemote(fd int) bool {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return true
	}
	switch uint32(st.Type) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.F2FS_SUPER_MAGIC,
		unix.OVERLAYFS_SUPER_MAGIC, 0x2fc12fc1 /* ZFS */ :
		return false
	}
	return true
}
