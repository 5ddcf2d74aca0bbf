package main

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	gfs "github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// user is a process that keeps a mount busy, a loop device, or another mount of the same filesystem.
type user struct {
	pid     int // 0 for what is no process
	command string
	what    string // "working directory", "open file", …
	loop    bool   // it is a loop device
}

func (u user) String() string {
	if u.pid == 0 {
		return pagecache.Printable(u.what)
	}
	return fmt.Sprintf("%s (process %d, %s)", pagecache.Printable(u.command), u.pid, pagecache.Printable(u.what))
}

// isBrief reports whether u may use the mount only for a moment: commands of gaiafs open the mountpoint to ask the
// daemon.
func (u user) isBrief() bool { return u.loop || u.command == "gaiafs" }

// usersOf lists what keeps the mount at an absolute path busy: mounts below it, loop devices, and then processes.
func usersOf(mountpoint string) []user {
	return slices.Concat(mountedInside(mountpoint), loopDevices(mountpoint), mountUsers(mountpoint))
}

// mountUsers lists the processes that keep the mount at an absolute path busy. It reads /proc, which may hide the
// processes of other users. It compares paths and never touches the mount, which may hang.
func mountUsers(mountpoint string) []user {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var users []user
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if what := usage(filepath.Join("/proc", e.Name()), mountpoint); what != "" {
			name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm"))
			if err != nil {
				continue // the process has just ended
			}
			users = append(users, user{pid: pid, command: strings.TrimSuffix(string(name), "\n"), what: what})
		}
	}
	return users
}

// mountedInside lists the mounts below the mountpoint of a mount, which keep it busy.
func mountedInside(mountpoint string) (users []user) {
	mounts, err := gfs.MountsSeenBy(os.Getpid())
	if err != nil {
		return nil
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, mountpoint+"/") {
			users = append(users, user{what: "the mount at " + m.Mountpoint})
		}
	}
	return users
}

// loopDevices lists the loop devices on files of the mount at an absolute path.
func loopDevices(mountpoint string) (users []user) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil
	}
	for _, name := range files {
		file, err := os.ReadFile(name)
		if err == nil && strings.HasPrefix(string(file), mountpoint+"/") {
			device := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(name)))
			what := "loop device " + device + " on " + strings.TrimSuffix(string(file), "\n")
			users = append(users, user{what: what, loop: true})
		}
	}
	return users
}

// usage says what the process with this directory in /proc uses of the mount. "" means nothing.
func usage(process, mountpoint string) string {
	inside := func(path string) bool { return path == mountpoint || strings.HasPrefix(path, mountpoint+"/") }
	for _, link := range [][2]string{{"cwd", "working directory"}, {"root", "root directory"},
		{"exe", "running program"}} {
		if target, err := os.Readlink(filepath.Join(process, link[0])); err == nil && inside(target) {
			return link[1]
		}
	}
	var found string
	// WalkDir of one flat directory. What cannot be read belongs to another user.
	_ = filepath.WalkDir(filepath.Join(process, "fd"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if target, err := os.Readlink(path); err == nil && inside(target) {
			found = "open file " + target
			return fs.SkipAll
		}
		return nil
	})
	if found != "" {
		return found
	}
	maps, err := os.ReadFile(filepath.Join(process, "maps"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(maps)) {
		if i := strings.IndexByte(line, '/'); i >= 0 && inside(strings.TrimSuffix(line[i:], "\n")) {
			return "mapped file " + strings.TrimSuffix(line[i:], "\n")
		}
	}
	return ""
}

// mountedElsewhere lists where a filesystem is mounted: its mountpoints in this mount namespace, and for every other
// namespace that has it, one process. The filesystem is identified by its device number. If it may have ended, another
// one may have that number by now; then source is what it showed, and otherwise "".
func mountedElsewhere(device, source string) []user {
	ours := func(m gfs.MountInfo) bool { return m.Device == device && (source == "" || m.Source == source) }
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var users []user
	if mounts, err := gfs.MountsSeenBy(os.Getpid()); err == nil {
		for _, m := range mounts {
			if ours(m) {
				users = append(users, user{what: "the mount at " + m.Mountpoint})
			}
		}
	}
	own, _ := os.Readlink("/proc/self/ns/mnt")
	seen := map[string]bool{own: true}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		space, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns/mnt"))
		if err != nil || seen[space] {
			continue // just ended, or of another user
		}
		mounts, err := gfs.MountsSeenBy(pid)
		if err != nil {
			continue
		}
		if _, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe")); err != nil {
			continue // a kernel thread, which nobody can end
		}
		name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm"))
		if err != nil {
			continue
		}
		seen[space] = true
		for _, m := range mounts {
			if ours(m) {
				what := "mounted at " + m.Mountpoint + " in its mount namespace"
				users = append(users, user{pid: pid, command: strings.TrimSuffix(string(name), "\n"), what: what})
			}
		}
	}
	return users
}

// without removes a process from a list, and reports whether it was in there.
func without(users []user, pid int) (others []user, was bool) {
	for _, u := range users {
		if u.pid == pid {
			was = true
		} else {
			others = append(others, u)
		}
	}
	return others, was
}

// describe names the first few users in one line.
func describe(users []user) string {
	const most = 5
	if len(users) == 0 {
		return "a process that cannot be seen from here"
	}
	var names []string
	for _, u := range users[:min(len(users), most)] {
		names = append(names, u.String())
	}
	text := strings.Join(names, ", ")
	if more := len(users) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// detach removes a mountpoint from the file tree. Programs that use the mount keep it until they close it.
func detach(mountpoint string) error {
	if os.Geteuid() == 0 {
		return unix.Unmount(mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	for _, program := range []string{"fusermount3", "fusermount"} {
		path, err := exec.LookPath(program)
		if err != nil {
			continue
		}
		if out, err := exec.Command(path, "-u", "-z", mountpoint).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(string(out)))
		}
		return nil
	}
	return exec.ErrNotFound
}
