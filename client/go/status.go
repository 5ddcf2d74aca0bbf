package gaiafs

import (
	"context"
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Status returns the status of the daemon of a mountpoint: a JSON document, see docs/status.md. Root and the user who
// mounted may name the daemon's control socket instead, for example after the mount was detached. Errors: ENOTTY or
// EINVAL if no gaiafs is mounted there, ECONNREFUSED or ENOTCONN if the daemon is gone, and those of opening the
// directory.
func Status(mountpoint string) ([]byte, error) {
	doc, err := status(mountpoint)
	return doc, during("status", err)
}

func status(mountpoint string) ([]byte, error) {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return nil, err
	}
	defer c.release()
	return c.document(context.Background(), typeStatus, token[:])
}

// connectTo connects to the daemon of a mountpoint, and returns a token for the mount. If mountpoint names the daemon's
// socket, the token is all zeros. The caller must release the connection.
func connectTo(mountpoint string) (*conn, [16]byte, error) {
	d, err := os.OpenFile(mountpoint, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, syscall.ENOTDIR) {
		if st, err := os.Stat(mountpoint); err == nil && st.Mode()&os.ModeSocket != 0 {
			c, err := openConn(mountpoint)
			return c, [16]byte{}, err
		}
	}
	if err != nil {
		return nil, [16]byte{}, asError(err, "%v", err)
	}
	defer d.Close()
	g, err := requestGrant(int(d.Fd()))
	if err != nil {
		return nil, [16]byte{}, err
	}
	if !g.status {
		return nil, [16]byte{}, failed(syscall.EINVAL, "the mount refused access to its status")
	}
	c, err := openConn(g.socket)
	return c, g.token, err
}
