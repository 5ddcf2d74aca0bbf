package controltest

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Recorded is a daemon that replays recorded frames. It answers each request, whatever it asks, with the frame of a
// given name, with the request's id. So it can play a daemon of the past or of the future.
type Recorded struct {
	// Answers has the names of frames by request type. EXTENTS come with memory of their sizes.
	Answers map[uint16][]string

	frames   map[string][]byte
	listener *net.UnixListener
	work     sync.WaitGroup

	mu    sync.Mutex
	asked []uint16          // types of requests that have no answer; guarded by mu
	conns []*net.UnixConn   // guarded by mu
	first map[uint16][]byte // the first request of each type; guarded by mu
}

// Version1 has the answers of a daemon of version 1.
var Version1 = map[uint16][]string{1: {"welcome"}, 2: {"mapped", "extents"}, 3: {"result"}, 4: {"result"},
	5: {"result"},
	6: {"result"}, 7: {"result"}}

// ListenRecorded starts to answer at path, with frames of those files.
func ListenRecorded(path string, answers map[uint16][]string, files ...string) (*Recorded, error) {
	r := &Recorded{Answers: answers, frames: make(map[string][]byte), first: make(map[uint16][]byte)}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			if name, digits, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
				if r.frames[name], err = hex.DecodeString(digits); err != nil {
					return nil, fmt.Errorf("%s: frame %s: %w", file, name, err)
				}
			}
		}
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	r.listener = l
	r.work.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, c)
			r.mu.Unlock()
			r.work.Go(func() { r.serve(c) })
		}
	})
	return r, nil
}

// Close stops the daemon.
func (r *Recorded) Close() {
	r.listener.Close()
	r.mu.Lock()
	for _, c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.work.Wait()
}

// Unexpected returns the types of requests that had no answer.
func (r *Recorded) Unexpected() []uint16 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.asked)
}

// First returns the body of the first request of a type.
func (r *Recorded) First(typ uint16) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first[typ]
}

func (r *Recorded) serve(c *net.UnixConn) {
	defer c.Close()
	for buf := make([]byte, 4096); ; {
		n, err := c.Read(buf)
		if err != nil || n < 16 {
			return
		}
		typ := binary.LittleEndian.Uint16(buf[4:])
		r.mu.Lock()
		if r.first[typ] == nil {
			r.first[typ] = slices.Clone(buf[16:n])
		}
		if r.Answers[typ] == nil {
			r.asked = append(r.asked, typ)
		}
		r.mu.Unlock()
		for _, name := range r.Answers[typ] {
			if r.send(c, slices.Clone(r.frames[name]), buf[8:16]) != nil {
				return
			}
		}
	}
}

// send sends a frame with another id, and memory for its extents.
func (r *Recorded) send(c *net.UnixConn, frame, id []byte) error {
	const extents = 0x8003
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	if len(frame) < 16 {
		return fmt.Errorf("there is no such frame")
	}
	if binary.LittleEndian.Uint16(frame[4:]) == extents {
		for i := range binary.LittleEndian.Uint32(frame[20:]) {
			at, stride := 24, 16
			if len(frame) != at+stride*int(binary.LittleEndian.Uint32(frame[20:])) { // version 2
				at, stride = 32, int(binary.LittleEndian.Uint32(frame[24:]))
			}
			fd, err := unix.MemfdCreate("extent", unix.MFD_CLOEXEC)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			if err := unix.Ftruncate(fd, int64(binary.LittleEndian.Uint64(frame[at+stride*int(i)+8:]))); err != nil {
				return err
			}
		}
	}
	copy(frame[8:], id)
	_, _, err := c.WriteMsgUnix(frame, unix.UnixRights(fds...), nil)
	return err
}
