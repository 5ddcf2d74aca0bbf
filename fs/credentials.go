package fs

import (
	"runtime"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// New files must get the caller's owner and group, and the mode that umask, set-gid directory and default ACL give, in
// the one backing call that creates them. Otherwise programs on the mount or in SOURCE could briefly see a file that
// root owns, or one with a wider mode.
//
// Calls that take blocks or inodes use the caller's right to them. Filesystems keep some for root and check quotas by
// the thread's filesystem user and its CAP_SYS_RESOURCE.
//
// So for one call the thread gets the caller's filesystem user (setfsuid(2)) and, for new files, the group. The kernel
// takes the filesystem capabilities away from a thread that leaves user 0. The daemon keeps them, because the kernel
// has already checked the caller's permission, with supplementary groups that the daemon does not know. It does not
// keep CAP_SYS_RESOURCE.
//
// Changing a thread's credentials takes longer than a small write, so there are as few changes as possible. A thread
// that serves an ordinary user loses CAP_SYS_RESOURCE for good, and keeps its other capabilities when its user changes
// (SECBIT_NO_SETUID_FIXUP). The daemon's own work needs neither. Root's calls get the capability back if they fail for
// lack of space.
//
// Rejected: one thread per user, since handing a call over costs more. Rejected: looking whether the disk is nearly
// full, since users can fill it between the look and the write.
//
// The umask of the process is always 0. If a directory has a default ACL, the backing filesystem must get the mode as
// the program gave it, and ignores the umask. Otherwise the umask is applied here. A umask per thread
// (unshare(CLONE_FS)) would save asking for the ACL, but needs threads of its own, and handing a call to one costs
// several times as much as asking.

// secureNoSetuidFixup is SECBIT_NO_SETUID_FIXUP of capabilities(7).
const secureNoSetuidFixup = 1 << 2

// capabilities is the argument of capset(2), version 3.
type capabilities [2]unix.CapUserData

// creator makes calls on behalf of callers.
type creator struct {
	// switches says that the process may act as other users.
	switches bool
	// marked says that SECBIT_NO_SETUID_FIXUP marks the threads without CAP_SYS_RESOURCE: no thread had the bit at
	// first.
	marked   bool
	uid, gid uint32
	// caps is the thread's capabilities while it acts as an ordinary user, own those at other times.
	caps, own capabilities
}

var capHeader = unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}

func newCreator() (creator, error) {
	c := creator{uid: uint32(unix.Geteuid()), gid: uint32(unix.Getegid())}
	header := capHeader
	if err := unix.Capget(&header, &c.own[0]); err != nil {
		return c, err
	}
	need := uint32(1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID)
	c.switches = c.own[0].Effective&need == need
	c.caps = c.own
	c.caps[unix.CAP_SYS_RESOURCE/32].Effective &^= 1 << (unix.CAP_SYS_RESOURCE % 32)
	c.marked = newThreadsAreUnmarked
	return c, nil
}

// newThreadsAreUnmarked is evaluated before any thread is marked.
var newThreadsAreUnmarked = secureBits()&secureNoSetuidFixup == 0

func secureBits() uintptr {
	bits, _, _ := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_GET_SECUREBITS, 0, 0)
	return bits
}

// as runs call with the caller's filesystem user and group, for calls that make inodes. call makes system calls only:
// it must not park the goroutine on anything that another creation may be waiting for.
func (c *creator) as(who *fuse.Caller, call func() error) error {
	return c.with(who.Uid, who.Gid, call)
}

// spend runs call, which may take space of the backing filesystem, with the user's right to space. The rules for call
// are those of as.
func (c *creator) spend(uid uint32, call func() error) error {
	return c.with(uid, c.gid, call)
}

func (c *creator) with(uid, gid uint32, call func() error) error {
	switch {
	case !c.switches:
		return call()
	case uid == c.uid && gid == c.gid:
		return c.fully(call)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if gid != c.gid {
		if !setfsid(unix.SYS_SETFSGID, gid) {
			return unix.EPERM
		}
		defer c.ownID(unix.SYS_SETFSGID, c.gid) // runs after restore
	}
	if uid == c.uid {
		return c.fully(call)
	}
	lasting, errno := c.mark()
	if errno != 0 {
		return errno
	}
	if !setfsid(unix.SYS_SETFSUID, uid) {
		return unix.EPERM
	}
	defer c.restore(lasting)
	if !lasting {
		if errno := capset(&c.caps); errno != 0 {
			return errno
		}
	}
	return call()
}

// mark lets the thread keep its capabilities, except CAP_SYS_RESOURCE, when its filesystem user changes. It returns
// false if that is not possible; then the caller sets the capabilities after each change of the user.
func (c *creator) mark() (lasting bool, errno syscall.Errno) {
	if !c.marked {
		return false, 0
	}
	bits := secureBits()
	if bits&secureNoSetuidFixup != 0 {
		return true, 0
	}
	// The capability goes first: a thread with the bit is taken to lack it.
	if errno := capset(&c.caps); errno != 0 {
		return false, errno
	}
	_, _, errno = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, bits|secureNoSetuidFixup, 0)
	return errno == 0, 0
}

// restore gives the thread the daemon's user back. A thread that cannot get it back must never run anything else.
func (c *creator) restore(lasting bool) {
	c.ownID(unix.SYS_SETFSUID, c.uid)
	if !lasting {
		mustCapset(&c.own)
	}
}

// ownID gives the thread the daemon's filesystem user or group back. It panics if that fails.
func (c *creator) ownID(call uintptr, id uint32) {
	if !setfsid(call, id) {
		panic("gaiafs: a thread that acted as a user cannot become the daemon's again")
	}
}

// fully runs call as the daemon's own user. If call fails for lack of space, fully runs it once more with
// CAP_SYS_RESOURCE, which the thread may have lost by serving an ordinary user.
func (c *creator) fully(call func() error) error {
	err := call()
	if err != syscall.ENOSPC && err != syscall.EDQUOT || c.own == c.caps {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if errno := capset(&c.own); errno != 0 {
		return err
	}
	defer mustCapset(&c.caps) // a marked thread must not have it
	return call()
}

// setfsid sets the filesystem user or group of the calling thread only, and reports whether it worked: the user
// namespace may have no such user, or memory for the new credentials may be lacking.
func setfsid(call uintptr, id uint32) bool {
	// These calls return the previous value on success and on failure (setfsuid(2)). No user has the number -1.
	_, _, _ = unix.RawSyscall(call, uintptr(id), 0, 0)
	now, _, _ := unix.RawSyscall(call, ^uintptr(0), 0, 0)
	return uint32(now) == id
}

// mustCapset is capset for a thread that must not continue with the capabilities that it has. It panics on failure.
func mustCapset(data *capabilities) {
	if errno := capset(data); errno != 0 {
		panic("gaiafs: a thread's capabilities cannot be set: " + errno.Error())
	}
}

func capset(data *capabilities) syscall.Errno {
	header := capHeader
	// Both arguments belong to this frame or to the creator, and the kernel only reads them.
	_, _, errno := unix.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(data)), 0)
	return errno
}

// creationMode returns the mode to pass to the backing call that creates a file in the directory dir, if a program
// asked for mode under umask.
func creationMode(dir int, mode, umask uint32) uint32 {
	if mode&umask&0777 == 0 || hasDefaultACL(dir) {
		return mode & 07777
	}
	return mode &^ umask & 07777
}

// hasDefaultACL reports whether the directory of the O_PATH descriptor dir has a default ACL.
func hasDefaultACL(dir int) bool {
	n, err := unix.Getxattr(procPath(dir), "system.posix_acl_default", nil)
	return err == nil && n > 0
}
