package fs

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Passthrough means that the kernel (since Linux 6.9) reads, writes and maps the backing file of an open itself,
// without requests and without pages of its own. The kernel requires that all opens of an inode are in one mode. While
// there is an open with kernel pages, it refuses an open in passthrough mode with EIO, and vice versa. All opens in
// passthrough mode name the same backing number. So the first open of a file decides, and the others follow until the
// last one is gone.
//
// The daemon counts at least as many opens as the kernel. An open counts here from before it is answered until RELEASE,
// which comes after the kernel has uncounted it. So if an open finds no others here, the kernel has none either, and an
// open that joins others finds the number still registered.
//
// The kernel opens the backing file once, with the flags of the program's open. O_APPEND and O_DIRECT would stay in
// force if the program clears them later (F_SETFL). So an open with these flags is mixed: the kernel maps the backing
// file and has no pages of its own, but reads and writes are requests, which carry the current flags. A flag that is
// set later is sent with each write (O_APPEND) or has no effect (O_DIRECT).
//
// A mapping made in passthrough mode maps the backing file, and outlives its open: RELEASE comes at close, even if
// pages are still mapped. So the daemon never knows when the last program stops writing. A file that was ever open for
// writing in this mode gets no kernel pages again, because these would not see such writes.
type passthrough struct {
	mu     sync.Mutex
	number int32 // the kernel's number of the backing file while through > 0, else 0; protected by mu
	// through counts the opens in passthrough mode, others those in other modes; protected by mu.
	through, others int
	written         bool // an open in passthrough mode could write; protected by mu

	// mappable is the number of opens in passthrough mode with mappings that programs can store into. Such stores
	// change the times of the backing file without the knowledge of the mount's inode, so the kernel must not cache the
	// attributes.
	mappable atomic.Int32
}

// kernelBacking registers backing files with the kernel.
type kernelBacking interface {
	RegisterBackingFd(*fuse.BackingMap) (int32, syscall.Errno)
	UnregisterBackingFd(number int32) syscall.Errno
}

// servedFlags are the flags of an open whose reads and writes go through the daemon even if the file passes through.
const servedFlags = unix.O_APPEND | unix.O_DIRECT

// enter decides how the kernel reads and writes through of, and counts it. of.close calls leave. It fails, and counts
// nothing, if the file passes through and of cannot.
func (fs *fileSystem) enter(of *openFile) syscall.Errno {
	p := &of.content.through
	p.mu.Lock()
	defer p.mu.Unlock()
	// The kernel answers EIO if it cannot open the backing file with the program's flags.
	barred := (p.number != 0 || fs.passes.Load()) && of.flags&unix.O_DIRECT != 0 && !takesDirect(of.fd)
	if barred && p.number != 0 {
		return syscall.EINVAL // as open(2) does
	}
	if p.through == 0 && p.others == 0 && !barred && fs.wantsPassthrough(of) {
		fs.registerBacking(of)
	}
	if p.number != 0 {
		p.through++
		p.written = p.written || of.writesHome
		of.number = p.number
		of.direct = of.direct || of.flags&servedFlags != 0
		if of.storesMapped() {
			p.mappable.Add(1)
		}
		return 0
	}
	p.others++
	of.direct = of.direct || p.written
	return 0
}

// registerBacking makes the kernel open the backing file of of. The kernel writes with the right to space of the user
// who registers. This is the user who opens the file. If that is the daemon's user, it is the file's owner, because
// others may open the file before it is closed. So only a file that the daemon's user owns, and opened first, gets the
// space that is reserved for that user, even if others write it.
func (fs *fileSystem) registerBacking(of *openFile) {
	uid := of.uid
	var st unix.Stat_t
	if uid == fs.creator.uid && unix.Fstat(of.fd, &st) == nil {
		uid = st.Uid
	}
	var number int32
	err := fs.creator.spend(uid, func() error {
		n, errno := fs.backing.RegisterBackingFd(&fuse.BackingMap{Fd: int32(of.fd)})
		if errno == 0 {
			number = n
			return nil
		}
		return errno
	})
	if err != nil {
		fs.passRefused(of, toErrno(err))
		return
	}
	of.content.through.number = number
}

// passRefused handles the kernel's refusal to register the backing file of of.
func (fs *fileSystem) passRefused(of *openFile, errno syscall.Errno) {
	first := fs.refused.Add(1) == 1
	switch {
	case errno == syscall.EPERM, errno == syscall.ENOTTY, errno == syscall.ENOSYS:
		fs.stopPassing("the kernel lets no file pass through", "error", errno)
	case errno == syscall.ELOOP && of.node.key.dev == fs.root.key.dev:
		fs.stopPassing("the kernel lets no file pass through: SOURCE is on a filesystem that is stacked on another", "error", errno)
	case first:
		// Possible reasons: a stacked filesystem below SOURCE (ELOOP), a file that the kernel cannot read and write
		// itself (EOPNOTSUPP, EINVAL), or no memory.
		fs.log.Warn("the kernel does not let this file, and maybe others, pass through: reads and writes go through the daemon",
			"node", of.node.path(), "error", errno)
	}
}

// stopPassing ends passthrough for new opens. A file that passes through already does so until its last open is gone.
func (fs *fileSystem) stopPassing(why string, args ...any) {
	if !fs.passes.CompareAndSwap(true, false) {
		return
	}
	if fs.writeBackLost {
		why += "; write-back was given up for passthrough, and '--passthrough off' gets it back"
	}
	fs.log.Warn(why+": reads and writes go through the daemon", args...)
}

// takesDirect reports whether the filesystem of fd allows O_DIRECT. Nothing else may use fd yet.
func takesDirect(fd int) bool {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return false
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_DIRECT); err != nil {
		return false
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags)
	return err == nil
}

// wantsPassthrough reports whether the first open of a file may pass through. It may not if the file allows only
// appending, if a device may have bytes of it, or if reads are being recorded: these need the daemon.
func (fs *fileSystem) wantsPassthrough(of *openFile) bool {
	return fs.passes.Load() && !of.appendOnly && of.content.live() == nil && fs.cache.Recording() == nil
}

// leave uncounts of.
func (fs *fileSystem) leave(of *openFile) {
	p := &of.content.through
	p.mu.Lock()
	defer p.mu.Unlock()
	if of.number == 0 {
		p.others--
		return
	}
	if of.storesMapped() {
		p.mappable.Add(-1)
	}
	if p.through--; p.through == 0 {
		// It fails only if the connection is gone, and the number with it.
		_ = fs.backing.UnregisterBackingFd(p.number)
		p.number = 0
	}
}

// storesMapped reports whether programs can store into mappings of of.
func (of *openFile) storesMapped() bool { return of.flags&unix.O_ACCMODE == unix.O_RDWR }

// attrTimeoutOf returns how long the kernel may cache the attributes of n, which has size bytes.
func (fs *fileSystem) attrTimeoutOf(n *node, size uint64) time.Duration {
	c := n.data.Load()
	if c != nil && c.through.mappable.Load() > 0 {
		return 0
	}
	if c != nil && fs.writeBack {
		if f := c.live(); f != nil && f.ReachesPast(page.Clamp(size)) {
			return 0 // makes the kernel ask before it writes, see beforeWrite
		}
	}
	return fs.keeps(n, fs.attrTimeout)
}

// passthroughPossible reports whether it makes sense to ask the kernel for passthrough. The kernel's own answer comes
// too late to ask for write-back caching instead, and it does not do both.
func passthroughPossible(source string) bool {
	var name unix.Utsname
	if os.Geteuid() != 0 || unix.Uname(&name) != nil || !atLeast(unix.ByteSliceToString(name.Release[:]), 6, 9) {
		return false
	}
	var st unix.Statfs_t
	return unix.Statfs(source, &st) == nil && st.Type != unix.OVERLAYFS_SUPER_MAGIC &&
		st.Type != unix.ECRYPTFS_SUPER_MAGIC
}

// atLeast reports whether a Linux release is major.minor or later.
func atLeast(release string, major, minor int) bool {
	var have [2]int
	_, _ = fmt.Sscanf(release, "%d.%d", &have[0], &have[1]) // what is missing stays 0
	return have[0] > major || have[0] == major && have[1] >= minor
}
