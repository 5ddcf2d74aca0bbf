package control

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is the longest path that the ioctl has room for, without the terminating zero byte.
const maxSocketPath = 103

// DefaultSocket returns the path of the socket for a mount: a name made from the mountpoint, in a runtime directory of
// the user. It changes nothing. Every daemon of a mountpoint gets the same path with number 0, so that a new daemon
// finds what a killed one left. Higher numbers are for mountpoints whose earlier daemons still serve; RemoveStale
// removes what killed daemons left of these.
func DefaultSocket(mountpoint string, number int) string {
	sum := sha256.Sum256([]byte(mountpoint))
	name := hex.EncodeToString(sum[:8])
	if number > 0 {
		name += fmt.Sprintf("-%d", number)
	}
	name += ".sock"
	if os.Geteuid() == 0 && CanFill(rootDir) {
		return filepath.Join(rootDir, name)
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		if path := filepath.Join(dir, "gaiafs", name); len(path) <= maxSocketPath {
			return path
		}
	}
	return filepath.Join("/tmp", fmt.Sprintf("gaiafs-%d", os.Geteuid()), name)
}

// rootDir is root's runtime directory.
const rootDir = "/run/gaiafs"

// CanFill reports whether this process may make files in dir, or may make dir. Root of a rootless container may not in
// every directory that belongs to root.
func CanFill(dir string) bool {
	err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS)
	if err == unix.ENOENT {
		err = unix.Faccessat(unix.AT_FDCWD, filepath.Dir(dir), unix.W_OK, unix.AT_EACCESS)
	}
	return err == nil
}

// CheckSocket returns an error if a path cannot be that of a socket. It touches no file.
func CheckSocket(path string) error {
	if !filepath.IsAbs(path) {
		return errors.New("the path must be absolute")
	}
	if len(path) > maxSocketPath {
		return fmt.Errorf("the path has %d bytes, but at most %d are possible: choose a shorter one", len(path),
			maxSocketPath)
	}
	return nil
}

// listen binds the socket. It replaces a socket that no daemon listens on any more. EADDRINUSE if one does.
func listen(path string, allowOther bool) (*net.UnixListener, error) {
	if err := CheckSocket(path); err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	unlock, err := openRuntimeDir(filepath.Dir(path), allowOther)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	mode := uint32(0o600)
	if allowOther {
		mode = 0o666
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// bind gives the file the mode of the unbound socket, minus the umask. So nobody can connect between bind and
		// the chmod below.
		var chmod error
		if err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), mode) }); err != nil {
			return err
		}
		return chmod
	}}
	l, err := lc.Listen(context.Background(), "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	ul := l.(*net.UnixListener)
	if err := os.Chmod(path, fs.FileMode(mode)); err != nil {
		ul.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return ul, nil
}

// RemoveStale removes the socket of a killed daemon, if there is one. EADDRINUSE if a daemon listens on it.
func RemoveStale(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := openRuntimeDir(filepath.Dir(path), false)
	if err != nil {
		return err
	}
	defer unlock()
	return removeStale(path)
}

// openRuntimeDir makes the socket's directory if it is missing, and refuses one in which others could replace the
// socket. It locks the directory, so that two daemons that start at once look at the socket one after the other.
func openRuntimeDir(dir string, allowOther bool) (unlock func(), err error) {
	mode := fs.FileMode(0o700)
	if allowOther {
		mode = 0o755
	}
	made := false
	switch err := os.Mkdir(dir, mode); {
	case err == nil:
		made = true
	case !errors.Is(err, fs.ErrExist):
		return nil, fmt.Errorf("control socket: %w", err)
	}
	d, err := openOwnDir(dir)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w; --socket chooses another place", err)
	}
	st, err := d.Stat()
	if err == nil && made {
		err = d.Chmod(mode)
	} else if err == nil && allowOther && int(ownerOf(st)) == os.Geteuid() && st.Mode()&0o001 == 0 {
		// An earlier mount without allow-other made it. Others must reach the socket, which has its own mode.
		err = d.Chmod(st.Mode().Perm() | 0o011)
	}
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { d.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			d.Close()
			return nil, fmt.Errorf("control socket: lock of directory %s: %w", dir, err)
		}
		time.Sleep(10 * time.Millisecond) // another daemon holds the lock while it binds
	}
}

// openOwnDir opens a directory in which only root and this user can replace a file. In /tmp anybody may have taken the
// name first, for a directory or for a link to one of this user's directories.
func openOwnDir(dir string) (*os.File, error) {
	own := func(st fs.FileInfo) bool { return ownerOf(st) == 0 || int(ownerOf(st)) == os.Geteuid() }
	nofollow := unix.O_NOFOLLOW
	if st, err := os.Lstat(dir); err == nil && st.Mode()&fs.ModeSymlink != 0 {
		if !own(st) {
			return nil, fmt.Errorf("%s is a link of user %d, who could redirect it", dir, ownerOf(st))
		}
		nofollow = 0
	}
	d, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|nofollow, 0)
	if err != nil {
		return nil, err
	}
	st, err := d.Stat()
	switch {
	case err != nil:
	case !own(st):
		err = fmt.Errorf("directory %s belongs to user %d, who could replace the socket", dir, ownerOf(st))
	case st.Mode()&0o022 != 0 && st.Mode()&fs.ModeSticky == 0:
		err = fmt.Errorf("directory %s is writable by others, who could replace the socket", dir)
	default:
		return d, nil
	}
	d.Close()
	return nil, err
}

func ownerOf(st fs.FileInfo) uint32 { return st.Sys().(*syscall.Stat_t).Uid }

// removeStale removes a socket that nobody listens on.
func removeStale(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	if st.Mode()&(fs.ModeSocket|fs.ModeSymlink) == 0 { // Announce makes links
		return fmt.Errorf("control socket %s: a file that is not a socket is in the way: %w", path, syscall.EEXIST)
	}
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	switch {
	case err == nil:
		conn.Close()
		return fmt.Errorf("control socket %s: another gaiafs listens on it: %w", path, syscall.EADDRINUSE)
	case errors.Is(err, syscall.EAGAIN): // its queue is full
		return fmt.Errorf("control socket %s: another gaiafs listens on it and does not answer: %w", path,
			syscall.EADDRINUSE)
	case errors.Is(err, syscall.ECONNREFUSED), st.Mode()&fs.ModeSymlink != 0 && errors.Is(err, fs.ErrNotExist):
	default: // EPROTOTYPE is a live socket of another kind, EACCES somebody else's
		return fmt.Errorf("control socket %s: something else may be using it: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("control socket: %w", err)
	}
	return nil
}
