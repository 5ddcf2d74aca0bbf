package fs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// place is the SOURCE and MOUNTPOINT of a mount, with symbolic links resolved.
type place struct {
	source, mountpoint string
}

// Check returns the error of Mount for a SOURCE or MOUNTPOINT that cannot be mounted, or for missing rights. It changes
// nothing.
func Check(source, mountpoint string, allowOther bool) error {
	if _, err := checkPlace(source, mountpoint); err != nil {
		return err
	}
	return CheckRights(allowOther)
}

// checkPlace returns an error for a SOURCE or MOUNTPOINT that cannot or should not be mounted.
func checkPlace(source, mountpoint string) (place, error) {
	source, err := directoryPath("SOURCE", source)
	if err != nil {
		return place{}, err
	}
	if mountpoint, err = directoryPath("MOUNTPOINT", mountpoint); err != nil {
		return place{}, err
	}
	if info, err := mountOf(mountpoint); err == nil && info.Mountpoint == mountpoint && info.isFUSE() {
		return place{}, fmt.Errorf("%s is the mountpoint of %s (%s) already: unmount it first or choose another directory",
			mountpoint, info.Source, info.Type)
	}
	if err := checkNesting(source, mountpoint); err != nil {
		return place{}, err
	}
	entries, err := os.ReadDir(mountpoint)
	if err != nil {
		return place{}, fmt.Errorf("MOUNTPOINT %s cannot be read (%w): choose a directory of your own", mountpoint,
			toErrno(err))
	}
	if len(entries) > 0 {
		return place{}, fmt.Errorf("MOUNTPOINT %s is not empty: choose an empty directory, since the mount would hide what is in it", mountpoint)
	}
	return place{source, mountpoint}, nil
}

// directoryPath returns the absolute path of a directory, without symbolic links. Its error says what is wrong with
// path.
func directoryPath(what, path string) (string, error) {
	if path == "" {
		return "", fmt.Errorf("%s is missing: name a directory", what)
	}
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", fmt.Errorf("%s %s does not exist: create it with mkdir, or check the spelling", what, path)
	case errors.Is(err, syscall.ENOTCONN):
		return "", fmt.Errorf("%s %s is a mount whose daemon has ended: unmount it with 'gaiafs umount %s'", what, path,
			path)
	case err != nil:
		return "", fmt.Errorf("%s %s cannot be reached (%w): check the permissions of the directories above it", what,
			path, toErrno(err))
	case !st.IsDir():
		return "", fmt.Errorf("%s %s is not a directory: name a directory", what, path)
	}
	absolute, err := filepath.Abs(path)
	if err == nil {
		absolute, err = filepath.EvalSymlinks(absolute)
	}
	if err != nil {
		return "", fmt.Errorf("%s %s cannot be resolved: %w", what, path, err)
	}
	return absolute, nil
}

// checkNesting refuses a mountpoint inside the source, because the mount would show itself without end, and a source
// inside the mountpoint, because the mount would hide it. It sees through bind mounts: it compares the directories
// above by inode, and by their paths inside their filesystem.
func checkNesting(source, mountpoint string) error {
	inside := func(inner, outer string) (bool, error) {
		above, err := isAbove(outer, inner)
		if above || err != nil {
			return above, err
		}
		return sameFilesystemAbove(outer, inner), nil
	}
	if same, err := sameDirectory(source, mountpoint); err != nil || same {
		if err != nil {
			return err
		}
		return fmt.Errorf("SOURCE and MOUNTPOINT are the same directory %s: choose another MOUNTPOINT", source)
	}
	if in, err := inside(mountpoint, source); err != nil || in {
		if err != nil {
			return err
		}
		return fmt.Errorf("MOUNTPOINT %s is inside SOURCE %s: choose a directory outside of it", mountpoint, source)
	}
	if in, err := inside(source, mountpoint); err != nil || in {
		if err != nil {
			return err
		}
		return fmt.Errorf("SOURCE %s is inside MOUNTPOINT %s, which would hide it: choose another MOUNTPOINT", source,
			mountpoint)
	}
	return nil
}

func inodeOf(path string) (inodeKey, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return inodeKey{}, fmt.Errorf("%s cannot be examined: %w", path, err)
	}
	return inodeKey{st.Dev, st.Ino}, nil
}

func sameDirectory(a, b string) (bool, error) {
	ka, err := inodeOf(a)
	if err != nil {
		return false, err
	}
	kb, err := inodeOf(b)
	return ka == kb, err
}

// isAbove reports whether outer is one of the directories above the absolute path inner.
func isAbove(outer, inner string) (bool, error) {
	want, err := inodeOf(outer)
	if err != nil {
		return false, err
	}
	for dir := inner; dir != "/"; {
		dir = filepath.Dir(dir)
		k, err := inodeOf(dir)
		if err != nil {
			return false, err
		}
		if k == want {
			return true, nil
		}
	}
	return false, nil
}

// sameFilesystemAbove reports whether inner is below outer in one filesystem, perhaps seen through different mounts.
func sameFilesystemAbove(outer, inner string) bool {
	o, err := mountOf(outer)
	if err != nil {
		return false
	}
	i, err := mountOf(inner)
	if err != nil || o.Device != i.Device {
		return false
	}
	op, ip := o.within(outer), i.within(inner)
	return op == "/" || strings.HasPrefix(ip, op+"/")
}

// CheckRights checks whether the process may mount and, with allowOther, whether it may let other users use the mount.
// Its errors say what is wrong and, after a colon, what to do.
func CheckRights(allowOther bool) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case err == syscall.ENOENT || err == syscall.ENODEV || err == syscall.ENXIO:
		return fmt.Errorf("there is no /dev/fuse: load the kernel module with `modprobe fuse`, or give the container the device")
	case err == syscall.EACCES || err == syscall.EPERM:
		if os.Geteuid() == 0 {
			return fmt.Errorf("/dev/fuse may not be opened (%w): give the container the device", err)
		}
		return fmt.Errorf("/dev/fuse may not be opened (%w): ask for membership in its group, or mount as root", err)
	case err != nil:
		return fmt.Errorf("/dev/fuse cannot be opened: %w", err)
	}
	unix.Close(fd)
	if os.Geteuid() == 0 {
		return nil
	}
	if _, err := fusermount(); err != nil {
		return err
	}
	if allowOther && !fuseConfAllowsOther("/etc/fuse.conf") {
		return errors.New("only root may use --allow-other: add the line user_allow_other to /etc/fuse.conf, or mount as root")
	}
	return nil
}

// fusermount returns the path of the program that mounts for ordinary users.
func fusermount() (string, error) {
	for _, name := range []string{"fusermount3", "/bin/fusermount3", "fusermount", "/bin/fusermount"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("fusermount3 is not installed: install the package fuse3, or run as root")
}

func fuseConfAllowsOther(path string) bool {
	conf, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(conf)) {
		if strings.TrimSpace(line) == "user_allow_other" {
			return true
		}
	}
	return false
}
