package fs

import (
	"runtime"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// New files must get the caller's owner and group, and the mode that umask, set-gid directory and default ACL give, in the
// one backing call that makes them: whoever looks in between, on the mount or in SOURCE, must not see a file of root's or
// with a wider mode.
//
// The owner comes from the thread's filesystem user and group (setfsuid(2)), set for that call only. Leaving user 0
// takes the thread's filesystem capabilities away; they are raised again, because the kernel already checked the
// caller's permission, with supplementary groups that are not known here. CAP_SYS_RESOURCE is not raised for others than
// root, so that they cannot make files past a quota or in blocks reserved for root.
//
// The umask of the process is 0 for good. Where a directory has a default ACL the backing must get the mode as the
// program gave it, and ignores the umask; where not, the umask is taken off here. A umask per thread (unshare(CLONE_FS))
// would do without asking for the ACL, but needs threads of its own, and handing a call to one costs several times as much
// as asking.

// capabilities is the argument of capset(2), version 3.
type capabilities [2]unix.CapUserData

// creator makes calls on behalf of callers.
type creator struct {
	// switches says that the process may act as other users.
	switches bool
	uid, gid uint32
	// caps is what the thread may do while it acts as an ordinary user, own what it may do otherwise.
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
	return c, nil
}

// as runs call with the caller's filesystem user and group. call makes system calls only: it must not park the goroutine
// on anything that another creation could be waiting for.
func (c *creator) as(who *fuse.Caller, call func() error) error {
	if !c.switches || who.Uid == c.uid && who.Gid == c.gid {
		return call()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer c.restore(who)
	setfsid(unix.SYS_SETFSGID, who.Gid)
	if who.Uid != c.uid {
		setfsid(unix.SYS_SETFSUID, who.Uid)
		if errno := capset(&c.caps); errno != 0 {
			return errno
		}
	}
	return call()
}

// restore gives the thread its own identity back. A thread that cannot get it back must never run anything else.
func (c *creator) restore(who *fuse.Caller) {
	setfsid(unix.SYS_SETFSGID, c.gid)
	if who.Uid == c.uid {
		return
	}
	setfsid(unix.SYS_SETFSUID, c.uid)
	if errno := capset(&c.own); errno != 0 {
		panic("gaiafs: cannot take back capabilities: " + errno.Error())
	}
}

// setfsid sets the filesystem user or group of the calling thread alone.
func setfsid(call uintptr, id uint32) {
	// These calls return the previous value, whether they worked or not (setfsuid(2)).
	_, _, _ = unix.RawSyscall(call, uintptr(id), 0, 0)
}

func capset(data *capabilities) syscall.Errno {
	header := capHeader
	// Both arguments belong to this frame or to the creator, and the kernel only reads them.
	_, _, errno := unix.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(data)), 0)
	return errno
}

// creationMode returns the mode to create with in the directory of descriptor dir, for a program that asked for mode under
// umask.
func creationMode(dir int, mode, umask uint32) uint32 {
	if mode&umask&0777 == 0 || hasDefaultACL(dir) {
		return mode & 07777
	}
	return mode &^ umask & 07777
}

// hasDefaultACL reports whether the directory of the O_PATH descriptor dir passes an ACL on to what is made in it.
func hasDefaultACL(dir int) bool {
	n, err := unix.Getxattr(procPath(dir), "system.posix_acl_default", nil)
	return err == nil && n > 0
}
