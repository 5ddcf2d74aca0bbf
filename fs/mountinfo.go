package fs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// MountInfo describes a mount as /proc/self/mountinfo lists it (proc_pid_mountinfo(5)).
type MountInfo struct {
	Mountpoint string
	// Type is the filesystem's type, "fuse.gaiafs" for gaiafs. Source is what is mounted; for gaiafs, the SOURCE
	// directory.
	Type, Source string

	// Device is the number of the filesystem's device, major:minor. Mounts of one filesystem have the same.
	Device string

	number   uint64 // the kernel's mount number
	strict   strictness
	writable bool   // both the mount and its filesystem are
	root     string // the mounted directory, in its filesystem
}

// ErrNotMounted says that a path is not a mountpoint.
var ErrNotMounted = errors.New("not a mountpoint")

// Type is the filesystem type of gaiafs mounts.
const Type = "fuse.gaiafs"

// NotOurs returns the error for a path that is not a mountpoint of gaiafs.
func NotOurs(path string) error {
	return fmt.Errorf("%s is not a mountpoint of gaiafs: 'gaiafs status' lists the mounts", path)
}

func (m MountInfo) isFUSE() bool {
	return m.Type == "fuse" || m.Type == "fuseblk" || strings.HasPrefix(m.Type, "fuse.")
}

// within returns the path inside the filesystem of a path at or below the mountpoint.
func (m MountInfo) within(path string) string {
	below, err := filepath.Rel(m.Mountpoint, path)
	if err != nil {
		return m.root
	}
	return filepath.Join(m.root, below)
}

// Mounts returns the gaiafs mounts that this process can see, in the order in which they were made.
func Mounts() ([]MountInfo, error) {
	all, err := readMounts()
	if err != nil {
		return nil, err
	}
	var ours []MountInfo
	for _, m := range all {
		if m.Type == Type {
			ours = append(ours, m)
		}
	}
	return ours, nil
}

// IsMount reports whether a gaiafs is mounted at path, even if its daemon has ended.
func IsMount(path string) (bool, error) {
	m, err := MountAt(path)
	if errors.Is(err, ErrNotMounted) {
		return false, nil
	}
	return err == nil && m.Type == Type, err
}

// mountOf returns the mount that contains an absolute path without symbolic links. /proc does not show the mount of the
// root directory in a chroot; its type and device are empty then.
func mountOf(path string) (MountInfo, error) {
	all, err := readMounts()
	if err != nil {
		return MountInfo{}, err
	}
	best := MountInfo{Mountpoint: "/", root: "/"}
	for _, m := range all {
		// Of mounts at one place, the last one covers the others.
		if below(path, m.Mountpoint) && len(m.Mountpoint) >= len(best.Mountpoint) {
			best = m
		}
	}
	return best, nil
}

// MountAt returns the mount whose mountpoint is path. The error wraps ErrNotMounted if nothing is mounted there.
func MountAt(path string) (MountInfo, error) {
	resolved, err := resolveMountpoint(path)
	if err != nil {
		return MountInfo{}, err
	}
	m, err := mountOf(resolved)
	if err != nil {
		return m, err
	}
	if m.Mountpoint != resolved {
		return m, fmt.Errorf("%s: %w", path, ErrNotMounted)
	}
	return m, nil
}

// MountOf returns the mount that contains path. It looks at no file of a gaiafs mount, because the daemon may not
// answer: it does not follow symbolic links inside such a mount.
func MountOf(path string) (MountInfo, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return MountInfo{}, err
	}
	const mostLinks = 40 // the kernel's limit
	for range mostLinks {
		m, err := mountOf(absolute)
		if err != nil || m.Type == Type {
			return m, err
		}
		// The first symbolic link in the path may lead into a gaiafs mount.
		next, err := followFirst(absolute)
		if err != nil || next == absolute {
			return m, err
		}
		absolute = next
	}
	return MountInfo{}, fmt.Errorf("%s: %w", path, syscall.ELOOP)
}

// followFirst replaces the first symbolic link in an absolute path by its target. It looks at no gaiafs mount.
func followFirst(path string) (string, error) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	at := "/"
	for i, part := range parts {
		at = filepath.Join(at, part)
		if m, err := mountOf(at); err != nil || m.Type == Type {
			return path, err
		}
		target, err := os.Readlink(at)
		if err != nil {
			continue
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(at), target)
		}
		return filepath.Join(append([]string{target}, parts[i+1:]...)...), nil
	}
	return path, nil
}

// resolveMountpoint resolves symbolic links. It does not look at a mountpoint itself, because the daemon may have ended
// or not answer.
func resolveMountpoint(path string) (string, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if dir, err := filepath.EvalSymlinks(filepath.Dir(absolute)); err == nil {
		candidate := filepath.Join(dir, filepath.Base(absolute))
		if m, err := mountOf(candidate); err == nil && m.Mountpoint == candidate {
			return candidate, nil
		}
	}
	resolved, err := filepath.EvalSymlinks(absolute)
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%s does not exist: check the spelling", path)
	}
	return resolved, err
}

func below(path, dir string) bool {
	return dir == "/" || path == dir || strings.HasPrefix(path, dir+"/")
}

// MountsSeenBy returns the mounts of all filesystems that a process sees.
func MountsSeenBy(pid int) ([]MountInfo, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMounts(f)
}

func readMounts() ([]MountInfo, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("mounts cannot be listed (%w): mount proc on /proc", err)
	}
	defer f.Close()
	return parseMounts(f)
}

// parseMounts parses lines of the form
//
//	36 35 98:0 /root /mountpoint rw,noatime shared:1 - fuse.gaiafs source rw
func parseMounts(r io.Reader) ([]MountInfo, error) {
	var mounts []MountInfo
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		left, right, ok := strings.Cut(lines.Text(), " - ")
		a, b := strings.Fields(left), strings.Fields(right)
		if !ok || len(a) < 6 || len(b) < 2 {
			continue
		}
		number, _ := strconv.ParseUint(a[0], 10, 64)
		mounts = append(mounts, MountInfo{
			number: number, strict: parseStrictness(a[5]),
			Device: a[2], root: unescape(a[3]), Mountpoint: unescape(a[4]),
			Type: b[0], Source: unescape(b[1]), writable: isWritable(a[5]) || len(b) > 2 && isWritable(b[2]),
		})
	}
	return mounts, lines.Err()
}

// isWritable reports whether mount options begin with "rw".
func isWritable(options string) bool { return strings.HasPrefix(options, "rw") }

// unescape undoes the octal escapes for space, tab, newline and backslash.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Unmount unmounts the gaiafs at mountpoint; it is for processes other than the daemon. The daemon writes everything
// back before the mount goes, and ends by itself; Unmount does not wait for its end. If programs use the mount, the
// error wraps EBUSY.
func Unmount(mountpoint string) error {
	m, err := MountAt(mountpoint)
	if errors.Is(err, ErrNotMounted) || err == nil && m.Type != Type {
		return NotOurs(mountpoint)
	}
	if err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		switch err := unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW); err {
		case nil:
			return nil
		case syscall.EBUSY:
			return busyError(m.Mountpoint)
		default:
			return fmt.Errorf("%s cannot be unmounted: %w", m.Mountpoint, err)
		}
	}
	program, err := fusermount()
	if err != nil {
		return err
	}
	out, err := exec.Command(program, "-u", m.Mountpoint).CombinedOutput()
	if err == nil {
		return nil
	}
	said := words(string(out))
	switch {
	case strings.Contains(said, "busy"):
		return busyError(m.Mountpoint)
	case strings.Contains(said, "not found in"): // fusermount3 looks only for mounts of this user
		return fmt.Errorf("%s cannot be unmounted: another user mounted it: only that user and root may", m.Mountpoint)
	}
	return fmt.Errorf("%s cannot be unmounted: %s", m.Mountpoint, said)
}
