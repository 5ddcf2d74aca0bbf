package gaiafs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The mount answers these ioctls with a grant: _IOR('G', 0x01, 128 bytes) and _IOWR('G', 0x02, 128 bytes).
const (
	ioctlGrantRequest = 2<<30 | grantSize<<16 | 'G'<<8 | 0x01
	ioctlGrantShown   = 3<<30 | grantSize<<16 | 'G'<<8 | 0x02
	grantSize         = 128
	grantMagic        = 0x61696167
	grantVersion      = 1
	// grantStatus in the flags means that the token is for the mount's status, not for a file.
	grantStatus uint16 = 1
)

// grant is the right to use one open file, or to read the status.
type grant struct {
	status bool
	token  [16]byte
	socket string
}

// requestGrant asks the mount for a grant for the descriptor. Tests without a mount replace it.
var requestGrant = ioctlGrant

func ioctlGrant(fd int) (grant, error) {
	defer watchGrant().Stop()
	var b [grantSize]byte
	// The kernel fills b before the call returns, and does not keep the pointer.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlGrantRequest, uintptr(unsafe.Pointer(&b)))
	if errno == syscall.EBADFD {
		// The kernel opens the files of the mount, so the daemon does not know how fd was opened.
		clear(b[:])
		binary.LittleEndian.PutUint32(b[:], uint32(fd))
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlGrantShown, uintptr(unsafe.Pointer(&b)))
	}
	if errno != 0 {
		switch errno {
		case syscall.ENOTTY, syscall.EINVAL, syscall.ENOSYS:
			return grant{}, failed(errno, "it is not on a gaiafs mount (the command gaiafs mount makes one)")
		case syscall.ESRCH:
			return grant{}, failed(errno, "the daemon does not see this process, which is in another PID namespace: "+
				"run it where the daemon can see it, or mount without --kernel-opens")
		}
		return grant{}, failed(errno, "the mount gave no access")
	}
	g, err := decodeGrant(b[:])
	if err != nil {
		return grant{}, failed(syscall.EPROTO, "%v", err)
	}
	return g, nil
}

// decodeGrant decodes the ioctl's answer.
func decodeGrant(b []byte) (grant, error) {
	if len(b) != grantSize || binary.LittleEndian.Uint32(b) != grantMagic {
		return grant{}, fmt.Errorf("the ioctl was answered by something that is not gaiafs")
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != grantVersion {
		return grant{}, fmt.Errorf("the mount's grants have version %d, but this library knows %d", v, grantVersion)
	}
	g := grant{status: binary.LittleEndian.Uint16(b[6:])&grantStatus != 0}
	copy(g.token[:], b[8:24])
	path, _, ok := bytes.Cut(b[24:], []byte{0})
	if !ok || len(path) == 0 {
		return grant{}, fmt.Errorf("the grant names no socket")
	}
	g.socket = string(path)
	return g, nil
}
