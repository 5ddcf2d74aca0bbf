package gaiafs

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// silence is how long a call waits before it says on stderr for whom.
var silence = 5 * time.Second

// watch reports on stderr that the daemon is stopped, if a request takes long. A daemon that runs may take long, too.
// The caller calls Stop when the request has ended.
func (c *conn) watch() *time.Timer {
	return time.AfterFunc(silence, func() {
		if who := stoppedPeer(c.uc); who != "" {
			fmt.Fprintf(os.Stderr, "gaiafs: still waiting for the daemon: %s\n", who)
		}
	})
}

// watchGrant is watch for the ioctl, which the daemon answers at once.
func watchGrant() *time.Timer {
	return time.AfterFunc(silence, func() {
		who := "'gaiafs status' says why"
		pool.mu.Lock()
		for _, c := range pool.conns {
			c.mu.Lock()
			uc := c.uc
			c.mu.Unlock()
			if uc == nil {
				continue
			}
			if stopped := stoppedPeer(uc); stopped != "" {
				who = stopped
			}
		}
		pool.mu.Unlock()
		fmt.Fprintf(os.Stderr, "gaiafs: still waiting for a mount that does not answer: %s\n", who)
	})
}

// stoppedPeer says what helps if the process at the other end is stopped. Otherwise it returns "".
func stoppedPeer(uc *net.UnixConn) (who string) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return ""
	}
	_ = raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			who = stoppedProcess(int(peer.Pid))
		}
	})
	return who
}

func stoppedProcess(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, state, ok := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	if !ok || !strings.HasPrefix(strings.ToUpper(state), "T") {
		return ""
	}
	return fmt.Sprintf("process %d is stopped, and 'kill -CONT %d' continues it", pid, pid)
}
