package fs

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Root mounts in two steps: the mount is made first, and attached to its mountpoint once it is served and guarded. A
// daemon that is killed before that leaves nothing behind, because the kernel ends a detached mount with its last
// descriptor. Users other than root mount by fusermount3, which does both at once.
//
// No thread of the daemon ever waits for an answer of the daemon itself while it mounts. Such a thread could not be
// killed.

// connection is a mount that is about to be served. Its descriptors close on exec: a child process that held one when
// the daemon dies would keep the mount from failing.
type connection struct {
	fd       int // of /dev/fuse; -1 once it belongs to a server
	notices  int // of /dev/fuse too, for expire
	root     int // O_PATH descriptor of the mount's root; the mount is busy as long as it is open
	device   string
	attached bool // to its mountpoint
}

// connect makes the mount.
func connect(o *Options, m *fuse.MountOptions) (*connection, error) {
	c := &connection{fd: -1, notices: -1, root: -1}
	var err error
	if os.Geteuid() == 0 {
		err = c.makeDetached(o, m)
	} else if c.fd, err = mountByFusermount(o.Mountpoint, m); err == nil {
		c.attached = true
		c.root, err = unix.Open(o.Mountpoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	}
	if err == nil {
		c.device, err = deviceOf(c.root)
	}
	if err == nil {
		c.notices, err = unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		return nil, errors.Join(err, c.discard(o.Mountpoint))
	}
	return c, nil
}

// makeDetached makes a mount that is not attached yet. See fsopen(2), fsconfig(2) and fsmount(2).
func (c *connection) makeDetached(o *Options, m *fuse.MountOptions) (err error) {
	if c.fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	made, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(made)
	flags := append([]string{}, m.Options...)
	if m.AllowOther {
		flags = append(flags, "allow_other")
	}
	attributes := o.strict.mountAttributes()
	if o.ReadOnly {
		flags = append(flags, "ro")
		attributes |= unix.MOUNT_ATTR_RDONLY
	}
	for _, flag := range flags {
		if err := unix.FsconfigSetFlag(made, flag); err != nil {
			return fmt.Errorf("option %s: %w", flag, err)
		}
	}
	for _, pair := range [][2]string{
		{"source", m.FsName},
		{"subtype", m.Name},
		{"fd", strconv.Itoa(c.fd)},
		{"rootmode", strconv.FormatUint(unix.S_IFDIR, 8)},
		{"user_id", strconv.Itoa(os.Geteuid())},
		{"group_id", strconv.Itoa(os.Getegid())},
		{"max_read", strconv.Itoa(maxRead)},
	} {
		if err := unix.FsconfigSetString(made, pair[0], pair[1]); err != nil {
			return fmt.Errorf("option %s: %w", pair[0], err)
		}
	}
	if err := unix.FsconfigCreate(made); err != nil {
		return err
	}
	c.root, err = unix.Fsmount(made, unix.FSMOUNT_CLOEXEC, attributes)
	return err
}

// serve returns a server of fs for the mount. It has answered the kernel's first request, and no other.
func (c *connection) serve(fs *fileSystem, m *fuse.MountOptions, withoutExpiry bool) (*fuse.Server, error) {
	fd := c.fd
	c.fd = -1
	server, err := fuse.NewServer(fs.served(), fmt.Sprintf("/dev/fd/%d", fd), m) // closes fd on failure
	if err != nil {
		return nil, err
	}
	if server.KernelSettings().Flags64()&fuse.CAP_HAS_EXPIRE_ONLY != 0 && !withoutExpiry {
		fs.notify = expiring{sparing{server, fs}, c}
	} else {
		fs.notify = sparing{server, fs}
	}
	return server, nil
}

// attach makes the mount appear at its mountpoint.
func (c *connection) attach(mountpoint string) error {
	if c.attached {
		return nil
	}
	err := unix.MoveMount(c.root, "", unix.AT_FDCWD, mountpoint, unix.MOVE_MOUNT_F_EMPTY_PATH)
	c.attached = err == nil
	return err
}

// release lets the mount be unmounted. A mount that is not attached ends.
func (c *connection) release() {
	closeOnce(&c.root)
}

// close closes all descriptors.
func (c *connection) close() {
	for _, fd := range []*int{&c.root, &c.notices, &c.fd} {
		closeOnce(fd)
	}
}

// discard ends a mount that is not served.
func (c *connection) discard(mountpoint string) (err error) {
	c.release()
	if c.attached {
		err = unmountPatiently(mountpoint)
	}
	c.close()
	return err
}

func closeOnce(fd *int) {
	if *fd >= 0 {
		unix.Close(*fd)
		*fd = -1
	}
}
