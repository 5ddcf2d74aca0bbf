package fs

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// mapper opens the file args[0] with the flags args[2] and maps args[1] bytes. It carries out what its input says:
	// an operation, an offset and a byte on each line. It answers each with a number or an error.
	programs["mapper"] = func(args []string) error {
		size, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		flags, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		f, err := os.OpenFile(args[0], flags, 0)
		if err != nil {
			return err
		}
		m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		fmt.Println(0)
		for {
			var what string
			var at int64
			var b byte
			if _, err := fmt.Scanln(&what, &at, &b); err != nil {
				return nil
			}
			p := []byte{b}
			switch what {
			case "store":
				m[at] = b
			case "load":
				p[0] = m[at]
			case "write":
				_, err = f.WriteAt(p, at)
			case "read":
				_, err = f.ReadAt(p, at)
			case "sync":
				if err = unix.Msync(m, unix.MS_SYNC); err == nil {
					err = f.Sync()
				}
			case "msync":
				err = unix.Msync(m, unix.MS_SYNC)
			case "stat":
				_, err = f.Stat()
			case "close":
				err = f.Close()
			}
			if err != nil {
				fmt.Println(err)
			} else {
				fmt.Println(p[0])
			}
		}
	}
}

// mapper is a process with an open and mapped file. A process must not touch mappings of its own mount: its runtime
// would wait for the page, and the daemon for the runtime.
type mapper struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Scanner
}

// maps starts a mapper of a file of the mount. It ends with the test, or when end is called.
func (s *scene) maps(t *testing.T, path string, size int) (m *mapper, end func()) {
	t.Helper()
	return s.mapsAs(t, path, size, os.O_RDWR)
}

// mapsAs is maps with the flags of the open.
func (s *scene) mapsAs(t *testing.T, path string, size, flags int) (m *mapper, end func()) {
	t.Helper()
	cmd := program("mapper", path, strconv.Itoa(size), strconv.Itoa(flags))
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	m = &mapper{t, in, bufio.NewScanner(out)}
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = in.Close()
			require.NoError(t, cmd.Wait())
		}
	}
	t.Cleanup(end)
	require.True(t, m.out.Scan())
	require.Equal(t, "0", m.out.Text())
	return m, end
}

// do carries out an operation and returns the byte that it read.
func (m *mapper) do(what string, at int64, b byte) byte {
	m.t.Helper()
	_, err := fmt.Fprintln(m.in, what, at, b)
	require.NoError(m.t, err)
	require.True(m.t, m.out.Scan(), what)
	got, err := strconv.ParseUint(m.out.Text(), 10, 8)
	require.NoError(m.t, err, what)
	return byte(got)
}
