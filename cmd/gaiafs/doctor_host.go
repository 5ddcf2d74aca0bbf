package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/fs"
)

// The checks of everything but GPUs.

func checkKernel() []check {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return []check{{"kernel", checkWarn, "its version is not known: " + err.Error(), ""}}
	}
	return []check{kernelCheck(unix.ByteSliceToString(u.Release[:]))}
}

// kernelCheck judges a version such as 6.18.5-amd64.
func kernelCheck(release string) check {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 {
		return check{"kernel", checkWarn, "Linux " + release + " has a version number that cannot be read", ""}
	}
	older := func(m, n int) bool { return major < m || major == m && minor < n }
	switch {
	case older(5, 15):
		return check{"kernel", checkWarn, "Linux " + release + " is older than any that gaiafs is tested on",
			"use Linux 6.1 or later"}
	case older(6, 9):
		return check{"kernel", checkOK, "Linux " + release + "; passthrough of files needs Linux 6.9", ""}
	}
	return check{"kernel", checkOK, "Linux " + release, ""}
}

func checkFUSE() []check {
	switch err := fs.CheckRights(false); {
	case err != nil:
		text, cure, _ := strings.Cut(err.Error(), ": ")
		return []check{{"fuse", checkFail, text, cure}}
	case os.Geteuid() == 0:
		return []check{{"fuse", checkOK, "/dev/fuse can be used", ""}}
	}
	all := []check{{"fuse", checkOK, "/dev/fuse and fusermount3 can be used", ""}}
	if err := fs.CheckRights(true); err != nil {
		_, cure, _ := strings.Cut(err.Error(), ": ")
		all = append(all, check{"fuse", checkWarn, "--allow-other is for root only", cure})
	}
	return all
}

func checkLimits() (all []check) {
	const files, maps = 1 << 16, 65530
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil {
		c := check{"limits", checkOK, fmt.Sprintf("%d open files", limit.Max), ""}
		if limit.Max < files {
			c.State, c.Cure = checkWarn, fmt.Sprintf("a mount needs one for each open file and each extent: raise the limit "+
				"to %d (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile of containers)", files)
		}
		all = append(all, c)
	}
	text, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if n, nerr := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && nerr == nil && n < maps {
		all = append(all, check{"limits", checkWarn, fmt.Sprintf("vm.max_map_count is %d", n),
			fmt.Sprintf("programs that map many extents need more: sysctl -w vm.max_map_count=%d", maps)})
	}
	return all
}

func checkMemory() []check {
	const least = 1 << 30
	available, host := availableMemory(), hostMemory(cgroupLimit)
	c := check{"memory", checkOK, fmt.Sprintf("%s of %s available; --host-memory would be %s", bytesText(available),
		bytesText(host), bytesText(int64(defaultHostMemory(cgroupLimit)))), ""}
	if available < least {
		c.State, c.Cure = checkWarn, "end other programs, or mount with a small --host-memory and --gpu-memory"
	}
	return []check{c}
}

func checkContainer() []check {
	name := ""
	for file, what := range map[string]string{"/.dockerenv": "Docker", "/run/.containerenv": "Podman"} {
		if _, err := os.Stat(file); err == nil {
			name = what
		}
	}
	if os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		name = "Kubernetes"
	}
	if name == "" {
		return nil
	}
	c := check{"container", checkOK, "this is a container of " + name, ""}
	_, fuse := os.Stat("/dev/fuse")
	_, gpu := os.Stat("/dev/nvidiactl")
	switch {
	case fuse != nil:
		c.State, c.Cure = checkFail, "give it /dev/fuse and permission to mount: --device /dev/fuse --cap-add SYS_ADMIN"
	case gpu != nil:
		c.Cure = "for GPUs, start it with --gpus all, or by the device plugin of Kubernetes"
	}
	return []check{c}
}

// checkMounts looks for daemons that have ended or do not answer.
func checkMounts() []check {
	rows, err := allMounts(askedFor)
	if err != nil {
		return []check{{"mounts", checkFail, err.Error(), "mount proc on /proc"}}
	}
	all := []check{{"mounts", checkOK, count(len(rows), "mount") + " of gaiafs", ""}}
	for _, r := range rows {
		switch {
		case r.State == "ended":
			all = append(all, check{"mounts", checkFail, r.Mountpoint + ": its daemon has ended",
				fmt.Sprintf("'gaiafs mount %s %s' mounts again; 'gaiafs umount %[2]s' only removes the mount", r.Source,
					r.Mountpoint)})
		case r.State == "silent":
			all = append(all, silentCheck(r))
		case r.Waiting > 0 && r.Ending != "":
			all = append(all, check{"mounts", checkWarn, fmt.Sprintf("%s: %s wait to be written back", r.Mountpoint,
				bytesText(r.Waiting)), "make room in " + r.Source})
		}
	}
	return all
}

// silentCheck is the finding about a mount whose daemon does not answer.
func silentCheck(r row) check {
	c := check{"mounts", checkFail, r.Mountpoint + ": " + noAnswer, r.what}
	if r.what == noAnswer {
		c.Cure = "end its process, or run 'gaiafs umount --force " + r.Mountpoint + "'"
	}
	return c
}

const (
	// diskFile is the most that is written to measure a disk. Writing and reading take at most diskTime each.
	diskFile = 256 << 20
	diskTime = time.Second
)

// checkDisk writes and reads an unlinked file, past the host's page cache if that is possible.
func checkDisk(dir string) []check {
	wrong := func(err error) []check {
		return []check{{"disk", checkWarn, fmt.Sprintf("%s was not measured: %v", dir, errno(err)),
			"name a folder where you may write: --dir DIR"}}
	}
	const flags = unix.O_TMPFILE | unix.O_RDWR | unix.O_CLOEXEC
	direct := ", past the host's page cache"
	fd, err := unix.Open(dir, flags|unix.O_DIRECT, 0o600)
	if err != nil {
		direct = ", through the host's page cache"
		fd, err = unix.Open(dir, flags, 0o600)
	}
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EISDIR) {
		path := filepath.Join(dir, fmt.Sprintf(".gaiafs-doctor-%d", os.Getpid()))
		if fd, err = unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o600); err == nil {
			err = unix.Unlink(path)
		}
	}
	if err != nil {
		return wrong(err)
	}
	defer unix.Close(fd)
	const piece = 4 << 20
	buf, err := unix.Mmap(-1, 0, piece, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned
	if err != nil {
		return wrong(err)
	}
	defer func() { _ = unix.Munmap(buf) }()
	for i := range buf {
		buf[i] = byte(i * 31)
	}
	written, writing, err := measured(diskFile, func(off int64) (int, error) { return unix.Pwrite(fd, buf, off) })
	if err != nil {
		return wrong(err)
	}
	if err := unix.Fsync(fd); err != nil {
		return wrong(err)
	}
	_, reading, err := measured(written, func(off int64) (int, error) { return unix.Pread(fd, buf, off) })
	if err != nil {
		return wrong(err)
	}
	return []check{{"disk", checkOK, fmt.Sprintf("%s: reads %s/s, writes %s/s%s", dir, bytesText(reading),
		bytesText(writing), direct), ""}}
}

// measured moves up to most bytes for at most diskTime. It returns how many it moved, and the rate per second.
func measured(most int64, move func(off int64) (int, error)) (bytes, rate int64, err error) {
	began := time.Now()
	for bytes < most && (bytes == 0 || time.Since(began) < diskTime) {
		n, err := move(bytes)
		if err != nil {
			return bytes, 0, err
		}
		if n == 0 {
			break
		}
		bytes += int64(n)
	}
	return bytes, int64(float64(bytes) / max(time.Since(began).Seconds(), 1e-9)), nil
}
