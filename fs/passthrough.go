package fs

import (
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Passthrough is the kernel's way (Linux 6.9) to read, write and map the backing file of an open itself, without
// requests and without pages of its own. The rule that everything here follows: all opens of an inode are in one mode.
// While an open with pages of the kernel's is there, one past them is refused with EIO, and the other way round; and
// all opens in passthrough mode name the same backing number. So the first open of a file decides, and the others
// follow until the last is gone.
//
// What the daemon counts is what the kernel counts, or more: an open counts here from before it is answered until
// RELEASE, which comes after the kernel took it off. So an open that finds none here finds none in the kernel, and one
// that joins finds the number still registered.
//
// The kernel opens the backing file with the flags that the program opens with, and never again: O_APPEND and O_DIRECT
// that the program clears later (F_SETFL) would stay. So such opens are of both kinds: the kernel maps the backing file
// and has no pages of its own, but reads and writes are requests, which carry the flags of the moment. A flag that is
// set later goes along with each write (O_APPEND) or does nothing (O_DIRECT).
//
// A mapping made in passthrough mode is one of the backing file, and outlives its open: RELEASE comes at close,
// whatever is still mapped. So the daemon never knows that nobody writes any more, and a file that was ever open for
// writing in this mode gets no pages of the kernel's again, which would not see such writes.
type passthrough struct {
	mu     sync.Mutex
	number int32 // the kernel's for the backing file, while through > 0; protected by mu
	// through and others are the opens in passthrough mode and in others; protected by mu.
	through, others int
	written         bool // an open in passthrough mode could write; protected by mu

	// mappable is the number of opens in passthrough mode whose mappings programs can store into. Such stores change
	// the times of the backing file and nobody tells the kernel's inode of the mount, so it may not keep them.
	mappable atomic.Int32
}

// kernelBacking registers backing files in the kernel.
type kernelBacking interface {
	RegisterBackingFd(*fuse.BackingMap) (int32, syscall.Errno)
	UnregisterBackingFd(number int32) syscall.Errno
}

// servedFlags are those of an open whose reads and writes come to the daemon even if the file passes through.
const servedFlags = unix.O_APPEND | unix.O_DIRECT

// enter decides how the kernel reads and writes through of, and counts it. of.close calls leave. It fails, and counts
// nothing, where the file passes through and of cannot.
func (fs *fileSystem) enter(of *openFile) syscall.Errno {
	p := &of.content.through
	p.mu.Lock()
	defer p.mu.Unlock()
	// The kernel says EIO where it cannot open the backing file like the program.
	barred := (p.number != 0 || fs.passes.Load()) && of.flags&unix.O_DIRECT != 0 && !takesDirect(of.fd)
	if barred && p.number != 0 {
		return syscall.EINVAL // open(2)
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

// registerBacking has the kernel open the backing file of of. It writes with the rights to space of whoever registers:
// those of who opens the file, and where that is the daemon's user, those of the file's owner, since others may open it
// too before it is closed. So only a file of the daemon's user's own, which that user opened first, gets space that is
// kept for that user, whoever writes it.
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

// passRefused notes that the kernel did not register the backing file of of.
func (fs *fileSystem) passRefused(of *openFile, errno syscall.Errno) {
	first := fs.refused.Add(1) == 1
	switch {
	case errno == syscall.EPERM, errno == syscall.ENOTTY, errno == syscall.ENOSYS:
		fs.stopPassing("the kernel lets no file pass through", "error", errno)
	case errno == syscall.ELOOP && of.node.key.dev == fs.root.key.dev:
		fs.stopPassing("the kernel lets no file pass through, since SOURCE is on a filesystem that is stacked on another", "error", errno)
	case first:
		// Another filesystem below SOURCE that is stacked (ELOOP), a file that the kernel cannot read and write itself
		// (EOPNOTSUPP, EINVAL), or no memory.
		fs.log.Warn("the kernel does not let this file pass through, and maybe others: it is read and written through the daemon",
			"node", of.node.path(), "error", errno)
	}
}

// stopPassing has the daemon serve every file of which nobody has an open that passes through, if it does not do so
// already.
func (fs *fileSystem) stopPassing(why string, args ...any) {
	if !fs.passes.CompareAndSwap(true, false) {
		return
	}
	if fs.writeBackLost {
		why += "; write-back was given up for passthrough, and '--passthrough off' gets it back"
	}
	fs.log.Warn(why+": reads and writes go through the daemon", args...)
}

// takesDirect reports whether the filesystem of fd, which nobody else uses yet, allows O_DIRECT.
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

// wantsPassthrough reports whether the first open of a file may pass through. Appending only is checked by the daemon,
// and bytes that only a device has, or reads that are being recorded, have to come through it.
func (fs *fileSystem) wantsPassthrough(of *openFile) bool {
	return fs.passes.Load() && !of.appendOnly && of.content.live() == nil && fs.cache.Recording() == nil
}

// leave takes of off the count.
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
		// It fails only where the connection is gone, and the number with it.
		_ = fs.backing.UnregisterBackingFd(p.number)
		p.number = 0
	}
}

// storesMapped reports whether programs can store into mappings of of.
func (of *openFile) storesMapped() bool { return of.flags&unix.O_ACCMODE == unix.O_RDWR }

// attrTimeoutOf is how long the kernel may keep the attributes of n, which has size bytes.
func (fs *fileSystem) attrTimeoutOf(n *node, size uint64) time.Duration {
	c := n.data.Load()
	if c != nil && c.through.mappable.Load() > 0 {
		return 0
	}
	if c != nil && fs.writeBack {
		if f := c.live(); f != nil && f.ReachesPast(page.Clamp(size)) {
			return 0 // so that it asks before it writes, see beforeWrite
		}
	}
	return fs.keeps(n, fs.attrTimeout)
}

// passthroughPossible reports whether it makes sense to ask the kernel for passthrough. Its answer comes too late to
// ask for write-back caching instead: it does not do both.
func passthroughPossible(source string) bool {
	var name unix.Utsname
	if os.Geteuid() != 0 || unix.Uname(&name) != nil || !atLeast(unix.ByteSliceToString(name.Release[:]), 6, 9) {
		return false
	}
	var st unix.Statfs_t
	return unix.Statfs(source, &st) == nil && st.Type != unix.OVERLAYFS_SUPER_MAGIC &&
		st.Type != unix.ECRYPTFS_SUPER_MAGIC
}

// atLeast reports whether a release of Linux is major.minor or later.
func atLeast(release string, major, minor int) bool {
	var have [2]int
	for i := range have {
		for release != "" && release[0] >= '0' && release[0] <= '9' {
			have[i] = have[i]*10 + int(release[0]-'0')
			release = release[1:]
		}
		if release == "" || release[0] != '.' {
			break
		}
		release = release[1:]
	}
	return have[0] > major || have[0] == major && have[1] >= minor
}
