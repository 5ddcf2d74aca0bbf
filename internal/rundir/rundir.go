// Package rundir makes directories for one run of a program. If the run cannot remove its directory, a later run does.
//
// Each directory has a file that its run keeps locked. The kernel drops the lock when the process ends, in whatever
// way. So if the lock is free, the run has ended. Only such directories are removed, and only those of the same user. A
// directory without the file, or one that another user made, stays.
//
// Before a directory is removed, FUSE filesystems that the run left mounted in it are detached. If anything is still
// mounted in it after that, the directory stays: files must not be removed through a mount.
package rundir

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// marker is the name of the locked file.
const marker = ".gaiafs-run"

// Dir is a directory of this run.
type Dir struct {
	Path string
	lock *os.File
}

// Make makes a directory in parent. Its name begins with prefix, which ends with "-".
func Make(parent, prefix string) (*Dir, error) {
	path, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return nil, err
	}
	d := &Dir{Path: path}
	// The file gets its final name only when it is locked. Before that, Sweep does not touch the directory.
	if d.lock, err = os.OpenFile(filepath.Join(path, marker+".new"), os.O_RDWR|os.O_CREATE|os.O_EXCL,
		0o600); err == nil {
		if err = unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			err = os.Rename(d.lock.Name(), filepath.Join(path, marker))
		}
	}
	if err != nil {
		return nil, errors.Join(err, d.Remove())
	}
	return d, nil
}

// Remove removes the directory and everything in it.
func (d *Dir) Remove() error {
	err := os.RemoveAll(d.Path)
	d.lock.Close() // last, so that Sweep does not remove it at the same time
	return err
}

// Keep turns it into an ordinary directory, which is never swept.
func (d *Dir) Keep() error {
	return errors.Join(os.Remove(filepath.Join(d.Path, marker)), d.lock.Close())
}

// Sweep removes the directories that Make made in parent with prefix, if their runs have ended. It returns their paths.
func Sweep(parent, prefix string) (swept []string) {
	parent, err := filepath.EvalSymlinks(parent) // as mountinfo names mountpoints
	if err == nil {
		parent, err = filepath.Abs(parent)
	}
	if err != nil {
		return nil
	}
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		rest, begins := strings.CutPrefix(e.Name(), prefix)
		if !begins || strings.Trim(rest, "0123456789") != "" {
			continue
		}
		if path := filepath.Join(parent, e.Name()); sweep(path) {
			swept = append(swept, path)
		}
	}
	return swept
}

// sweep removes a directory if its run has ended, and reports whether it did.
func sweep(path string) bool {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer dir.Close()
	st, err := dir.Stat()
	if err != nil || !own(st) || st.Mode()&0o022 != 0 {
		return false
	}
	fd, err := unix.Openat(int(dir.Fd()), marker, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	lock := os.NewFile(uintptr(fd), marker)
	defer lock.Close()
	if st, err = lock.Stat(); err != nil || !own(st) || !st.Mode().IsRegular() {
		return false
	}
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return false
	}
	for _, mountpoint := range mountsBelow(path, true) {
		detach(mountpoint)
	}
	return len(mountsBelow(path, false)) == 0 && os.RemoveAll(path) == nil
}

func own(st os.FileInfo) bool { return int(st.Sys().(*syscall.Stat_t).Uid) == os.Geteuid() }

// mountsBelow returns the mountpoints below a directory, the last mount first. With onlyFUSE, it returns only those of
// FUSE.
func mountsBelow(dir string, onlyFUSE bool) (mountpoints []string) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{dir} // assume that something is mounted
	}
	undo := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(table)) {
		left, right, _ := strings.Cut(line, " - ")
		fields := strings.Fields(left)
		if len(fields) < 5 || onlyFUSE && !strings.HasPrefix(right, "fuse") {
			continue
		}
		if at := undo.Replace(fields[4]); strings.HasPrefix(at, dir+"/") {
			mountpoints = append([]string{at}, mountpoints...)
		}
	}
	return mountpoints
}

func detach(mountpoint string) {
	if unix.Unmount(mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) == nil {
		return
	}
	_ = exec.Command("fusermount3", "-u", "-z", mountpoint).Run() // on failure the caller finds the mount
}
