package controltest

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
)

// GrantSize is the size of what the ioctl fills in.
const GrantSize = 128

// EncodeGrant encodes a grant as the ioctl does.
func EncodeGrant(g control.Grant, status bool) []byte {
	b := make([]byte, GrantSize)
	binary.LittleEndian.PutUint32(b, 0x61696167)
	binary.LittleEndian.PutUint16(b[4:], 1)
	if status {
		binary.LittleEndian.PutUint16(b[6:], 1)
	}
	copy(b[8:], g.Token[:])
	copy(b[24:GrantSize-1], g.Socket)
	return b
}

// Grants answers on a socket what the ioctl would answer. A client connects (SOCK_SEQPACKET) and sends one byte with a
// descriptor. It gets the GrantSize bytes of the ioctl, or 4 bytes with an errno.
type Grants struct {
	server   *control.Server
	listener *net.UnixListener
	work     sync.WaitGroup

	mu    sync.Mutex
	files []*File // guarded by mu
}

// ListenGrants starts to answer for server, on the socket at path.
func ListenGrants(server *control.Server, path string) (*Grants, error) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	g := &Grants{server: server, listener: l}
	g.work.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				g.answer(c)
				c.Close()
			}
		}
	})
	return g, nil
}

// Close stops answering, and closes every file for which it gave a grant.
func (g *Grants) Close() {
	g.listener.Close()
	g.work.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, f := range g.files {
		f.Close()
	}
}

func (g *Grants) answer(c *net.UnixConn) {
	buf, rights := make([]byte, 8), make([]byte, unix.CmsgSpace(4))
	_, rn, _, _, err := c.ReadMsgUnix(buf, rights)
	if err != nil {
		return
	}
	reply, err := g.grant(rights[:rn])
	if err != nil {
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			errno = syscall.EIO
		}
		reply = binary.LittleEndian.AppendUint32(nil, uint32(errno))
	}
	c.Write(reply)
}

func (g *Grants) grant(rights []byte) ([]byte, error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) != 1 {
		return nil, syscall.EBADF
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, syscall.EBADF
	}
	f := os.NewFile(uintptr(fds[0]), "granted file")
	if st, err := f.Stat(); err != nil || st.IsDir() {
		f.Close()
		grant, err := g.server.GrantStatus(0)
		return EncodeGrant(grant, true), err
	}
	file, err := NewFile(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	g.mu.Lock()
	g.files = append(g.files, file)
	g.mu.Unlock()
	grant, err := g.server.Grant(file, 0)
	return EncodeGrant(grant, false), err
}

// AskGrant asks a Grants at path for a grant of the descriptor.
func AskGrant(path string, fd int) ([]byte, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if _, _, err := c.WriteMsgUnix([]byte{1}, unix.UnixRights(fd), nil); err != nil {
		return nil, err
	}
	buf := make([]byte, GrantSize)
	n, err := c.Read(buf)
	if err != nil {
		return nil, err
	}
	if n == 4 {
		return nil, syscall.Errno(binary.LittleEndian.Uint32(buf))
	}
	return buf[:n], nil
}
