package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// frameWanted is the output of top --once. M stands for the mountpoint.
const frameWanted = `gaiafs M  0 clients  0 mappings
           used       of    clean    dirty    stale   pinned     in/s    out/s
gpu0    6.0 MiB   16 MiB  5.0 MiB      0 B      0 B      0 B        -        -
gpu1        0 B   16 MiB      0 B      0 B      0 B      0 B        -        -
pinned      0 B   32 MiB
reads  host -  read ahead -  devices -  disk -

  file                                           size on devices mappings
> weights                                     5.0 MiB    5.0 MiB        0

gpu0       cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc
`

// top prints a frame of a real mount, and refuses to run without a terminal.
func TestTopOnce(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=16M", "--pinned-memory=32M")
	path := filepath.Join(s.mountpoint, "weights")
	require.NoError(t, os.WriteFile(path, make([]byte, 5*mib), 0o600))
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=0", path).code)
	r := gaiafsCommand(t, "top", "--once", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	_, body, _ := strings.Cut(r.out, "\n") // a long mountpoint is cut in the first line
	_, want, _ := strings.Cut(frameWanted, "\n")
	require.Equal(t, want, body)
	require.Contains(t, r.out, "gaiafs "+s.mountpoint[:20])
	r = gaiafsCommand(t, "top", s.mountpoint)
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.err, "top needs a terminal: --once prints one frame without one")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// Rates refer to the time between two samples, the busiest file comes first, and frames fit the terminal.
func TestTopFrame(t *testing.T) {
	at := time.Unix(1e9, 0)
	sample := func(in, read int64, at time.Time) topSample {
		var s topSample
		s.at = at
		s.Mount.Mountpoint = "/mnt/data"
		s.Devices = []pagecache.DeviceStatus{{MemoryBytes: 8 << 30, UsedBytes: 4 << 30,
			PinnedBytes: 3 << 20, Moved: []mover.Moved{{Way: "in", Bytes: in / 3}, {Way: "peer", Bytes: in - in/3},
				{Way: "within", Bytes: in}}}}
		s.PinnedBytes, s.PinnedLimit = 3<<20, 1<<30
		s.Programs = []control.Program{{Process: 41, User: 7, Name: "idle", Bytes: 2 << 30, Requests: 50},
			{Process: 42, User: 7, Name: "busy", Bytes: 1 << 30, Requests: in}}
		s.Counters = map[string]int64{"disk_read_bytes": read}
		s.Files = []pagecache.FileStatus{{Name: "large", Inode: 1,
			Holders: []pagecache.HoldingStatus{{Resident: 9, Map: "cs"}}},
			{Name: "busy\x1b[2J", Inode: 2, Counters: map[string]int64{"disk_read_bytes": read},
				Holders: []pagecache.HoldingStatus{{Resident: 1, Map: "d."}}}}
		return s
	}
	before, now := sample(0, 0, at), sample(6<<30, 2<<20, at.Add(2*time.Second))
	frame := topFrame(before, now, 0, 80, 24)
	require.Regexp(t, `\ngpu0    4\.0 GiB  8\.0 GiB .* 3\.0 MiB  3\.0 GiB        -\npinned  3\.0 MiB  1\.0 GiB\n`, frame)
	require.Contains(t, frame, "disk 1.0 MiB/s")
	require.Regexp(t, `\n  busy +42 +7  1\.0 GiB\n  idle +41 +7  2\.0 GiB\n`, frame)
	require.Contains(t, frame, "\n> busy?[2J")
	require.Contains(t, frame, "\n  large")
	require.Contains(t, frame, "\ngpu0       d.\n")
	require.Contains(t, topFrame(before, now, 1, 80, 24), "\ngpu0       cs\n", "the file with inode number 1")
	for name, shown := range map[string]string{strings.Repeat("語", 30): strings.Repeat("語", 19) + "… ",
		strings.Repeat("x", 50): strings.Repeat("x", 39) + "…", "a語": "a語" + strings.Repeat(" ", 37)} {
		now.Files[0].Name = name
		require.Contains(t, topFrame(before, now, 0, 80, 24), "  "+shown+"        0 B     36 KiB        0\n",
			"widths are columns of a terminal, not letters")
	}
	now.Files[0] = pagecache.FileStatus{Name: "model", Inode: 1, SizeBytes: 80 << 20, Mappings: 1,
		Views: []pagecache.ViewStatus{{Bytes: 90 << 20, FileBytes: 80 << 20, Resident: 20480, Clean: 15360, Stale: 5120,
			Files: 2, Mappings: 2, Map: "ccs"}}}
	shown := topFrame(before, now, 1, 80, 24)
	require.Contains(t, shown, "> model"+strings.Repeat(" ", 40)+"80 MiB     80 MiB        3\n")
	require.Contains(t, shown, "\ngpu0 view  ccs\n")
	require.Regexp(t, `\ngpu0 +4\.0 GiB +8\.0 GiB +60 MiB +0 B +20 MiB `, shown, "clean and stale, with those of views")
	now.Mount.Mountpoint = "/mnt/" + strings.Repeat("x", 200)
	require.Regexp(t, `^gaiafs /mnt/x+…  0 clients  0 mappings\n`, topFrame(before, now, 0, 80, 24))
	for i := range 100 {
		now.Files = append(now.Files, now.Files[0])
		now.Files[i+2].Inode = uint64(i + 3)
	}
	for _, f := range now.Files {
		chosen := f.Inode
		lines := strings.Split(strings.TrimSuffix(topFrame(before, now, chosen, 80, 24), "\n"), "\n")
		require.LessOrEqual(t, len(lines), 24)
		require.Equal(t, 1, strings.Count(strings.Join(lines, "\n"), "\n> "), chosen)
		for _, l := range lines {
			require.LessOrEqual(t, len([]rune(l)), 80)
		}
	}
}

// Keys choose a file and end the view. A terminal that is too small gets a message.
func TestTopModel(t *testing.T) {
	var m tea.Model = topModel{width: 80, height: 24}
	files := func(busy, idle string) (s topSample) { // busy is first on the screen
		for name, inode := range map[string]uint64{"a": 1, "b": 2, "c": 3} {
			f := pagecache.FileStatus{Name: name, Inode: inode}
			if name == busy {
				f.Holders = []pagecache.HoldingStatus{{Resident: 2}}
			} else if name != idle {
				f.Holders = []pagecache.HoldingStatus{{Resident: 1}}
			}
			s.Files = append(s.Files, f)
		}
		return s
	}
	see := func(s topSample) { m, _ = m.Update(sampled{topSample: s}) }
	press := func(key rune) { m, _ = m.Update(tea.KeyPressMsg{Code: key}) }
	see(files("a", "c"))
	require.Contains(t, m.(topModel).screen(), "\n> a")
	see(files("b", "c"))
	require.Contains(t, m.(topModel).screen(), "\n> b", "the busiest file, until a key chooses one")
	press(tea.KeyDown)
	require.Contains(t, m.(topModel).screen(), "\n> a")
	for _, s := range []topSample{files("a", "c"), files("b", "a"), files("c", "b")} {
		see(s)
		require.Contains(t, m.(topModel).screen(), "\n> a", "the chosen file, wherever it is on the screen")
	}
	press(tea.KeyDown)
	require.Contains(t, m.(topModel).screen(), "\n> b")
	press(tea.KeyDown)
	require.Contains(t, m.(topModel).screen(), "\n> b", "the last row")
	press(tea.KeyUp)
	press(tea.KeyUp)
	press(tea.KeyUp)
	require.Contains(t, m.(topModel).screen(), "\n> c", "the first row")
	see(topSample{})
	press(tea.KeyDown)
	require.Contains(t, m.(topModel).screen(), "devices hold nothing")
	lines := strings.Split(m.(topModel).screen(), "\n")
	require.Len(t, lines, leastHeight, "the keys are in the last line")
	require.Equal(t, topKeys, lines[leastHeight-1])
	m, _ = m.Update(tea.WindowSizeMsg{Width: 79, Height: 24})
	require.Contains(t, m.(topModel).screen(), "top needs 80 columns and 24 lines.\nThis terminal has 79 and 24.")
	_, quit := m.Update(tea.KeyPressMsg{Code: 'q', Text: "q"})
	require.NotNil(t, quit)
	m, _ = m.Update(sampled{err: syscall.ENOTCONN})
	require.ErrorContains(t, m.(topModel).err, "has ended")
}

// terminal returns both ends of a new terminal (pts(4)).
func terminal(t *testing.T) (screen, tty *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { screen.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err = os.OpenFile(fmt.Sprint("/dev/pts/", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	return screen, tty
}

// Commands other than top ask the terminal nothing. Not every terminal answers, and a command would wait for it.
func TestCommandsAskTerminalsNothing(t *testing.T) {
	screen, tty := terminal(t)
	cmd := command(t, "help")
	cmd.Env = append(cmd.Env, "TERM=xterm-256color", "CI=")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 70}))
	require.NoError(t, cmd.Start())
	require.NoError(t, tty.Close())
	out, _ := io.ReadAll(screen) // EIO once the command has ended
	require.NoError(t, cmd.Wait())
	require.NotContains(t, string(out), "\x1b")
	require.Contains(t, string(out), "Programs on the\r\nCPU use them as usual;", "lines of 70 columns")
}
