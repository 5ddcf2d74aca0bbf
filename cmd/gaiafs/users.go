package main

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	gfs "github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// user is a process that keeps a mount busy, or another mount of the same filesystem.
type user struct {
	pid     int
	command string
	what    string // "working directory", "open file", …
}

func (u user) String() string {
	if u.pid == 0 {
		return pagecache.Printable(u.what)
	}
	return fmt.Sprintf("%s (process %d, %s)", pagecache.Printable(u.command), u.pid, pagecache.Printable(u.what))
}

// mountUsers lists the processes that keep the mount at an absolute path busy, as far as /proc tells: other users'
// processes may be hidden from this one. It compares paths and asks the mount nothing, which may not answer any more.
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
				continue // it has just ended
			}
			users = append(users, user{pid, strings.TrimSuffix(string(name), "\n"), what})
		}
	}
	return users
}

// usage says what the process with that directory in /proc uses of the mount; "" for nothing.
func usage(process, mountpoint string) string {
	inside := func(path string) bool { return path == mountpoint || strings.HasPrefix(path, mountpoint+"/") }
	for _, link := range [][2]string{{"cwd", "working directory"}, {"root", "root directory"},
		{"exe", "running program"}} {
		if target, err := os.Readlink(filepath.Join(process, link[0])); err == nil && inside(target) {
			return link[1]
		}
	}
	var found string
	// WalkDir of one flat directory: what cannot be read is somebody else's.
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

// mountedElsewhere lists where a filesystem is mounted: its mountpoints in this mount namespace, and a process of each
// other that has it. It is told by the number of its device.
func mountedElsewhere(device string) []user {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var users []user
	if mounts, err := gfs.MountsSeenBy(os.Getpid()); err == nil {
		for _, m := range mounts {
			if m.Device == device {
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
			continue // it has just ended, or is somebody else's
		}
		mounts, err := gfs.MountsSeenBy(pid)
		if err != nil {
			continue
		}
		if _, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe")); err != nil {
			continue // a thread of the kernel's, which nobody can end
		}
		name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm"))
		if err != nil {
			continue
		}
		seen[space] = true
		for _, m := range mounts {
			if m.Device == device {
				what := "mounted at " + m.Mountpoint + " in its mount namespace"
				users = append(users, user{pid, strings.TrimSuffix(string(name), "\n"), what})
			}
		}
	}
	return users
}

// without leaves out a process, and reports whether it was there.
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

// describe names users in one line, the first few of them.
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

// detach takes a mountpoint away from the tree of files. Programs that use the mount keep it until they are done.
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
