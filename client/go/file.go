package gaiafs

import (
	"context"
	"encoding/binary"
	"os"
	"syscall"
	"time"
)

// The operations of a FILE request, and the number that means all devices.
const (
	fileInspect = 1
	fileWarm    = 2
	fileVerify  = 3
	fileEvict   = 4
	fileLock    = 5

	allDevices = 1<<32 - 1
)

// Inspect returns what the daemon knows about an open file: a JSON document, see docs/status.md. Errors: EACCES if f is
// not open for reading, ENOSYS if the daemon is too old, and those of Map about f and the daemon.
func Inspect(ctx context.Context, f *os.File) ([]byte, error) {
	doc, err := askFile(ctx, f, fileInspect, 0, 0, 0)
	return doc, during("inspect", err)
}

// Warm brings length bytes at off of an open file to a device. device is the mount's number. The bytes stay there until
// room is needed; this process maps nothing. off is a multiple of 4096. Warm returns a JSON document, see
// docs/status.md. Errors are those of Map, and ENOSYS as in Inspect.
func Warm(ctx context.Context, f *os.File, device int, off, length int64) ([]byte, error) {
	doc, err := askFile(ctx, f, fileWarm, uint32(device), off, length)
	return doc, during("warm", err)
}

// Verify compares what a device holds of length bytes at off of an open file with the backing file: the device computes
// hashes, and the daemon compares them. It returns a JSON document, see docs/status.md. Errors are those of Warm.
func Verify(ctx context.Context, f *os.File, device int, off, length int64) ([]byte, error) {
	doc, err := askFile(ctx, f, fileVerify, uint32(device), off, length)
	return doc, during("verify", err)
}

// Evict evicts the extents of an open file that nobody maps from a device, or from all devices if device is negative.
// Bytes that only a device has are written back first. It returns a JSON document, see docs/status.md. Errors: EPERM
// for users other than root and the one who mounted, and those of Inspect.
func Evict(ctx context.Context, f *os.File, device int) ([]byte, error) {
	of := uint32(allDevices)
	if device >= 0 {
		of = uint32(device)
	}
	doc, err := askFile(ctx, f, fileEvict, of, 0, 0)
	return doc, during("evict", err)
}

// LockHost locks the pages of an open file in the host's page cache, from where devices copy fastest, and returns when
// they are locked. The file must be pinned on the host ('gaiafs pin --device host'). Inspect shows how far it is.
// Errors: EINVAL if it is not, ENOSPC and EDQUOT if the mount, or the file's owner, may not lock as much, EOPNOTSUPP if
// the device or the filesystem cannot lock pages of files, ENODEV without devices, and those of Inspect.
func LockHost(ctx context.Context, f *os.File) error {
	_, err := askFile(ctx, f, fileLock, 0, 0, 0)
	return during("lock", err)
}

func askFile(ctx context.Context, f *os.File, operation, device uint32, off, length int64) ([]byte, error) {
	file, err := duplicate(f)
	if err != nil {
		return nil, err
	}
	defer file.Close() // the token is valid while a descriptor is open
	g, err := requestGrant(int(file.Fd()))
	if err != nil {
		return nil, err
	}
	if g.status {
		return nil, failed(syscall.EISDIR, "the descriptor is a directory")
	}
	c, err := openConn(g.socket)
	if err != nil {
		return nil, err
	}
	defer c.release()
	return c.document(ctx, typeFile, fileBody(g.token, operation, device, off, length))
}

// Kinds of daemon profiles.
const (
	ProfileCPU        = 1
	ProfileHeap       = 2
	ProfileGoroutines = 3
	ProfileStacks     = 4
	ProfileBlock      = 5
	ProfileMutex      = 6
)

// Profile asks the daemon of a mountpoint for a profile of itself, and returns it. length applies to kinds that record
// for a time. Errors: EPERM for users other than root and the one who mounted, ENOSYS as in Inspect, and those of
// Status.
func Profile(ctx context.Context, mountpoint string, kind uint32, length time.Duration) ([]byte, error) {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return nil, during("profile", err)
	}
	defer c.release()
	doc, err := c.document(ctx, typeProfile, profileBody(token, kind, uint32(length.Milliseconds())))
	return doc, during("profile", err)
}

// document sends a request whose answer is DOCUMENT frames, or a RESULT with an error. If ctx ends, it closes the
// connection.
func (c *conn) document(ctx context.Context, typ frameType, body []byte) (doc []byte, err error) {
	stop := context.AfterFunc(ctx, func() { c.shut(failed(syscall.ECANCELED, "%v", context.Cause(ctx))) })
	defer stop()
	err = c.do(typ, body, func(h header, body []byte, _ []int) error {
		switch h.typ {
		case typeDocument:
			doc = append(doc, body...)
			return nil
		case typeResult:
			if _, err := resultOf(body); err != nil {
				return err
			}
		}
		return failed(syscall.EPROTO, "the daemon answered type %d with type %#x", typ, uint16(h.typ))
	})
	if err != nil {
		return nil, err
	}
	return doc, nil
}

func fileBody(token [16]byte, operation, device uint32, off, length int64) []byte {
	b := binary.LittleEndian.AppendUint32(token[:], operation)
	b = binary.LittleEndian.AppendUint32(b, device)
	b = binary.LittleEndian.AppendUint64(b, uint64(off))
	return binary.LittleEndian.AppendUint64(b, uint64(length))
}

func profileBody(token [16]byte, kind, ms uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(token[:], kind), ms)
}
