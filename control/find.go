package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// MostDaemons is how many daemons of one mountpoint may run at once. All but one have mounts in other mount namespaces,
// or detached mounts.
const MostDaemons = 16

// Listener is a socket on which a daemon listens.
type Listener struct {
	Path string
	// PID is the listening process, as the kernel reports it. So it is known even if the daemon does not answer. 0: it
	// is not known, for example because the process is in another PID namespace.
	PID int
}

// Listeners returns this user's daemons that serve, or once served, a mountpoint: an absolute path without links. ""
// means all mountpoints. It asks only the kernel, and waits for no daemon.
func Listeners(mountpoint string) (all []Listener) {
	var names []string
	if mountpoint != "" {
		for n := range MostDaemons {
			names = append(names, filepath.Base(DefaultSocket(mountpoint, n)))
		}
	}
	for _, dir := range runtimeDirs() {
		d, err := openOwnDir(dir)
		if err != nil {
			continue
		}
		found, err := d.Readdirnames(-1)
		d.Close()
		if err != nil {
			continue
		}
		slices.Sort(found)
		for _, name := range found {
			if !strings.HasSuffix(name, ".sock") || names != nil && !slices.Contains(names, name) {
				continue
			}
			path := filepath.Join(dir, name)
			pid, listens := ListenerOf(path)
			twice := func(l Listener) bool { return l.PID == pid && pid != 0 }
			if listens && !slices.ContainsFunc(all, twice) {
				all = append(all, Listener{path, pid})
			}
		}
	}
	return all
}

// runtimeDirs returns the directories in which a daemon of this user may have its socket, whatever environment it was
// started with.
func runtimeDirs() []string {
	uid := os.Geteuid()
	others := []string{fmt.Sprintf("/run/user/%d/gaiafs", uid), fmt.Sprintf("/tmp/gaiafs-%d", uid)}
	if uid == 0 {
		others = append(others, rootDir) // of the host's root, in a container
	}
	dirs := []string{filepath.Dir(DefaultSocket("/", 0))}
	for _, dir := range others {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// ListenerOf returns the process that listens on a socket, as Listener.PID, and whether one does. It does not wait.
func ListenerOf(path string) (pid int, listens bool) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return 0, errors.Is(err, syscall.EAGAIN) // the queue of connections is full
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, true
	}
	return int(peer.Pid), true
}

// Announce makes Listeners find the Server although its socket is not the default one. Call it before others use the
// Server.
func (s *Server) Announce(mountpoint string) error {
	for n := range MostDaemons {
		link := DefaultSocket(mountpoint, n)
		if link == s.opts.Socket {
			return nil
		}
		unlock, err := openRuntimeDir(filepath.Dir(link), s.opts.AllowOther)
		if err != nil {
			return err
		}
		err = removeStale(link)
		if err == nil {
			err = os.Symlink(s.opts.Socket, link)
		}
		unlock()
		if err == nil {
			s.link = link
			return nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
	return fmt.Errorf("%d daemons of %s are still running: %w", MostDaemons, mountpoint, syscall.EADDRINUSE)
}
