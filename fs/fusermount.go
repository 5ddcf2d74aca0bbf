package fs

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Users other than root mount by fusermount3, which is setuid root (fusermount3(1)). The daemon calls it itself:
// go-fuse reports only the exit status, not the reason.

// mountByFusermount mounts, and returns the descriptor of the connection to the kernel, which closes on exec. Errors
// quote fusermount3.
func mountByFusermount(mountpoint string, m *fuse.MountOptions) (fd int, err error) {
	program, err := fusermount()
	if err != nil {
		return -1, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	local, remote := os.NewFile(uintptr(pair[0]), "fusermount"), os.NewFile(uintptr(pair[1]), "fusermount")
	defer local.Close()
	defer remote.Close()
	cmd := exec.Command(program, "-o", strings.Join(fusermountOptions(m), ","), "--", mountpoint)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	cmd.ExtraFiles = []*os.File{remote} // descriptor 3
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		if text := words(said.String()); text != "" {
			return -1, errors.New(text)
		}
		return -1, fmt.Errorf("%s: %w", program, err)
	}
	return receiveDescriptor(local)
}

// fusermountOptions returns the options that go-fuse would pass.
func fusermountOptions(m *fuse.MountOptions) []string {
	options := append([]string{}, m.Options...)
	if m.AllowOther {
		options = append(options, "allow_other")
	}
	options = append(options, "fsname="+m.FsName, "subtype="+m.Name, fmt.Sprintf("max_read=%d", m.MaxWrite))
	escape := strings.NewReplacer(`\`, `\\`, `,`, `\,`)
	for i, o := range options {
		options[i] = escape.Replace(o)
	}
	return options
}

// words returns a program's output in one line and without the program's name.
func words(said string) string {
	var lines []string
	for line := range strings.Lines(said) {
		if line = strings.TrimSpace(line); line != "" {
			if name, text, _ := strings.Cut(line, ": "); text != "" &&
				strings.HasPrefix(path.Base(name), "fusermount") {
				line = text
			}
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// receiveDescriptor receives a descriptor from a socket.
func receiveDescriptor(socket *os.File) (fd int, err error) {
	c, err := net.FileConn(socket)
	if err != nil {
		return -1, err
	}
	defer c.Close()
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := c.(*net.UnixConn).ReadMsgUnix(make([]byte, 4), rights)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return -1, errors.Join(errors.New("fusermount3 sent no descriptor"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, errors.Join(errors.New("fusermount3 sent no descriptor"), err)
	}
	return fds[0], nil // Go receives descriptors with close-on-exec
}

// unmountPatiently unmounts. If the mount is busy, it tries again for a moment: a program may just have closed its
// last file.
func unmountPatiently(mountpoint string) error {
	for pause := 5 * time.Millisecond; ; pause *= 2 {
		err := Unmount(mountpoint)
		if !errors.Is(err, syscall.EBUSY) || pause > 80*time.Millisecond {
			return err
		}
		time.Sleep(pause)
	}
}
