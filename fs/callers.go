package fs

import (
	"os"
	"strconv"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A mount may be idmapped (mount_setattr(2), Linux 6.12), as container runtimes do for pods with a user namespace of
// their own. The kernel then translates owners and groups. If a server supports this, the kernel no longer says in
// requests who makes them, also on mounts that are not idmapped. Only requests that make an inode name a user, who is
// the new inode's owner.
//
// The daemon needs the caller's rights to space, to devices and to some flags. These are the rights of the caller's
// user in the daemon's user namespace, whatever that user is mapped to. So the daemon looks in /proc who the thread is.
// It sees every process if it is in the initial PID namespace. In other ones, mounts cannot be idmapped.

// unknownUser is the user and the group in a request that does not say who makes it.
const unknownUser = ^uint32(0)

// seesAllProcesses reports whether this process can look up every caller.
func seesAllProcesses() bool {
	const initial = "pid:[4026531836]" // PROC_PID_INIT_INO of Linux
	ns, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ns == initial && ownProc()
}

// fillCaller fills in the user and the group of a caller if the request does not say them. The thread waits for the
// answer to its request, so its number means no other thread. The directory of a thread in /proc belongs to its
// effective user, always.
func fillCaller(who *fuse.Caller) {
	if who.Uid != unknownUser {
		return
	}
	who.Uid, who.Gid = nobody, nobody
	var st unix.Stat_t
	if who.Pid != 0 && unix.Stat("/proc/"+strconv.FormatUint(uint64(who.Pid), 10), &st) == nil {
		who.Uid, who.Gid = st.Uid, st.Gid
	}
}

// identified is a handler of requests that say who makes them, where the user counts.
type identified struct{ fuse.RawFileSystem }

// Open implements fuse.RawFileSystem.
func (i identified) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.Open(cancel, in, out)
}

// Write implements fuse.RawFileSystem.
func (i identified) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if in.WriteFlags&fuse.WRITE_CACHE == 0 {
		fillCaller(&in.Caller)
	}
	return i.RawFileSystem.Write(cancel, in, data)
}

// SetAttr implements fuse.RawFileSystem.
func (i identified) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.SetAttr(cancel, in, out)
}

// SetXAttr implements fuse.RawFileSystem.
func (i identified) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.SetXAttr(cancel, in, attr, data)
}

// ListXAttr implements fuse.RawFileSystem.
func (i identified) ListXAttr(cancel <-chan struct{}, header *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	fillCaller(&header.Caller)
	return i.RawFileSystem.ListXAttr(cancel, header, dest)
}

// Rename implements fuse.RawFileSystem.
func (i identified) Rename(cancel <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.Rename(cancel, in, from, to)
}

// Link implements fuse.RawFileSystem.
func (i identified) Link(cancel <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.Link(cancel, in, name, out)
}

// Fallocate implements fuse.RawFileSystem.
func (i identified) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.Fallocate(cancel, in)
}

// CopyFileRange implements fuse.RawFileSystem.
func (i identified) CopyFileRange(cancel <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	fillCaller(&in.Caller)
	return i.RawFileSystem.CopyFileRange(cancel, in)
}

// Ioctl implements fuse.RawFileSystem.
func (i identified) Ioctl(
	cancel <-chan struct{}, in *fuse.IoctlIn, argument []byte, out *fuse.IoctlOut, reply []byte,
) fuse.Status {
	fillCaller(&in.Caller)
	return i.RawFileSystem.Ioctl(cancel, in, argument, out, reply)
}
