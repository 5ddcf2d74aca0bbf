package fs

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// A grant allows on devices what the program's descriptor allows on the CPU. If the kernel opens files itself, the
// request for a grant does not say what that is: any descriptor can make it, one for writing only, too. On read-only
// mounts all descriptors read. On writable ones the program shows its descriptor: it sends the number, and the daemon
// reads in /proc how the descriptor was opened. The thread that asks is blocked in the request, so /proc is about its
// process. If the thread is killed and another process gets its number, nobody gets the answer.
//
// A hostile program may change what the number leads to at any moment. So everything must follow from one read of
// fdinfo: access mode, mount and inode number are of one open file then. They prove that it is an open of the file if
//
//   - the mount is one of ours. The daemon first opens the number with O_PATH, looks which mount that is on, and keeps
//     it until fdinfo was read: so the mount's number is not given to another mount meanwhile.
//   - no other inode of ours has the inode number. That may be so after a file was removed in SOURCE while programs
//     have it open, if another file got its number. And the numbers that files below SOURCE show on the mount are
//     mixed, so that whoever chooses the numbers of a filesystem could choose equal ones. Only root is trusted with
//     these.
//
// Rejected: taking the descriptor itself (SCM_RIGHTS, pidfd_getfd). Closing it flushes the file, so the daemon would
// wait for itself, or for a foreign filesystem that never answers.

// noneShown says that a program showed no descriptor.
const noneShown = -1

// shownFile is a file to which a program has shown a descriptor. It allows what the descriptor allows.
type shownFile struct {
	*openFile        // the daemon's own
	access    uint32 // O_RDONLY, O_WRONLY or O_RDWR
	uid       uint32 // of the program
}

// Readable implements pagecache.Source.
func (f shownFile) Readable() bool { return f.access == unix.O_RDONLY || f.access == unix.O_RDWR }

// Writable implements pagecache.Source.
func (f shownFile) Writable() bool { return f.access == unix.O_WRONLY || f.access == unix.O_RDWR }

// sourceFor returns the source of a grant to who, who asks through used and shows a descriptor.
func (fs *fileSystem) sourceFor(used usedFile, who *fuse.Caller, descriptor int32) (pagecache.Source, syscall.Errno) {
	if used.kept == nil || !fs.unseenOpens {
		return used.openFile, 0
	}
	if descriptor < 0 {
		return nil, syscall.EBADFD // an older library
	}
	access, errno := fs.accessShown(used.node, who, descriptor)
	if errno != 0 {
		return nil, errno
	}
	return shownFile{used.openFile, access, who.Uid}, 0
}

// accessShown returns the access mode of a descriptor of who. EBADF means that it is not an open of n, ESRCH that the
// daemon cannot see who.
func (fs *fileSystem) accessShown(n *node, who *fuse.Caller, descriptor int32) (uint32, syscall.Errno) {
	// Before and after: a node that shares n's number may be forgotten, or made, meanwhile.
	if errno := fs.unmistakable(n, who); errno != 0 {
		return 0, errno
	}
	open, errno := fs.lookShown(who, descriptor)
	switch {
	case errno != 0:
		return 0, errno
	case open.ino != fs.inodeNumber(n.key) || open.flags&unix.O_PATH != 0:
		return 0, syscall.EBADF
	}
	return open.flags & unix.O_ACCMODE, fs.unmistakable(n, who)
}

// lookShown returns what /proc says of a descriptor of who, which is open on this mount.
func (fs *fileSystem) lookShown(who *fuse.Caller, descriptor int32) (open shownOpen, _ syscall.Errno) {
	if who.Pid == 0 || !ownProc() {
		return open, syscall.ESRCH // in a PID namespace that is not below the daemon's, or /proc is of another one
	}
	process, number := "/proc/"+strconv.FormatUint(uint64(who.Pid), 10), strconv.Itoa(int(descriptor))
	fs.touching.RLock()
	pin, err := unix.Open(process+"/fd/"+number, unix.O_PATH|unix.O_CLOEXEC, 0)
	defer fs.background.Go(func() { // closing it waits for nothing, unless it is the last use of a detached mount
		unix.Close(pin)
		fs.touching.RUnlock()
	})
	switch {
	case err == syscall.ENOENT && unix.Access(process+"/fd", unix.F_OK) == nil:
		return open, syscall.EBADF
	case err != nil:
		return open, syscall.ESRCH
	}
	var st unix.Statx_t
	if err := peek(pin, "", &st); err != nil || st.Mask&unix.STATX_MNT_ID == 0 {
		return open, syscall.EPROTONOSUPPORT
	}
	device := fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor)
	if device != fs.device {
		return open, syscall.EBADF
	}
	info, err := os.ReadFile(process + "/fdinfo/" + number)
	if err != nil {
		return open, syscall.EBADF
	}
	open, ok := parseShown(string(info))
	switch {
	case !ok:
		return open, syscall.EPROTONOSUPPORT
	case open.mount != st.Mnt_id:
		return open, syscall.EBADF
	}
	return open, 0
}

// ownProc reports whether /proc shows the numbers of the daemon's PID namespace, as requests do. A container may have
// the host's, where the same number is another process.
var ownProc = sync.OnceValue(func() bool {
	numbers, _ := procStatus("self", "NSpid:")
	return len(strings.Fields(numbers)) == 1 // more for each namespace between
})

// unmistakable returns an error if another inode may show the same number as n and who is not root.
func (fs *fileSystem) unmistakable(n *node, who *fuse.Caller) syscall.Errno {
	switch {
	case who.Uid == 0:
		return 0
	case n.key.dev != fs.root.key.dev:
		return syscall.EXDEV
	case fs.table.shared(n.key):
		return syscall.EBUSY
	}
	return 0
}

// shownOpen is what /proc says of an open file.
type shownOpen struct {
	flags      uint32
	mount, ino uint64
}

// parseShown parses the text of a file in /proc/PID/fdinfo. It needs all three lines (Linux 5.14).
func parseShown(text string) (open shownOpen, ok bool) {
	found := 0
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":\t")
		var err error
		switch name {
		case "flags":
			var flags uint64
			flags, err = strconv.ParseUint(value, 8, 32)
			open.flags = uint32(flags)
		case "mnt_id":
			open.mount, err = strconv.ParseUint(value, 10, 64)
		case "ino":
			open.ino, err = strconv.ParseUint(value, 10, 64)
		default:
			continue
		}
		if err != nil {
			return open, false
		}
		found++
	}
	return open, found == 3
}
