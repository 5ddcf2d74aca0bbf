package fs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMountRefuses(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"source/inner", "empty", "full/file", "other"} {
		require.NoError(t, os.MkdirAll(at(name), 0755))
	}
	require.NoError(t, os.WriteFile(at("plain"), nil, 0644))
	require.NoError(t, os.Symlink("source/inner", at("link")))
	require.NoError(t, os.Mkdir(at("source/above"), 0755))
	s := mount(t)
	for _, c := range []struct{ source, mountpoint, says string }{
		{"", at("empty"), "SOURCE is missing"},
		{at("none"), at("empty"), "does not exist"},
		{at("plain"), at("empty"), "is not a directory"},
		{at("plain/below"), at("empty"), "cannot be reached"},
		{at("source"), "", "MOUNTPOINT is missing"},
		{at("source"), at("none"), "does not exist"},
		{at("source"), at("plain"), "is not a directory"},
		{at("source"), at("full"), "is not empty"},
		{at("source"), at("source"), "same directory"},
		{at("source"), at("source/inner"), "is inside SOURCE"},
		{at("source"), at("link"), "is inside SOURCE"},
		{at("source/inner"), at("source"), "is inside MOUNTPOINT"},
		{at("link"), at("source"), "is inside MOUNTPOINT"},
		{"/", at("empty"), "is inside SOURCE"},
		{at("source"), s.mnt, "already"},
	} {
		server, err := Mount(Options{Source: c.source, Mountpoint: c.mountpoint})
		if server != nil {
			assert.NoError(t, server.Unmount())
		}
		if assert.Error(t, err, "%s on %s", c.source, c.mountpoint) {
			assert.Contains(t, err.Error(), c.says)
			assert.NotContains(t, err.Error(), "\n")
		}
	}
}

func TestMountRefusesNestingThroughBindMounts(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"source/sub/leaf", "bind", "empty"} {
		require.NoError(t, os.MkdirAll(at(name), 0755))
	}
	for from, leaf := range map[string]string{"source": "sub/leaf", "source/sub": "leaf"} {
		require.NoError(t, unix.Mount(at(from), at("bind"), "", unix.MS_BIND, ""))
		_, err := Mount(Options{Source: at("source"), Mountpoint: filepath.Join(at("bind"), leaf)})
		assert.ErrorContains(t, err, "is inside SOURCE")
		_, err = Mount(Options{Source: filepath.Join(at("bind"), leaf), Mountpoint: at("source")})
		assert.ErrorContains(t, err, "is inside MOUNTPOINT")
		require.NoError(t, unix.Unmount(at("bind"), 0))
	}
	// A sibling directory, seen through a bind mount, is not nested.
	require.NoError(t, unix.Mount(at("empty"), at("bind"), "", unix.MS_BIND, ""))
	defer func() { require.NoError(t, unix.Unmount(at("bind"), 0)) }()
	server, err := Mount(Options{Source: at("source"), Mountpoint: at("bind")})
	require.NoError(t, err)
	assert.NoError(t, server.Unmount())
}

func init() {
	programs["mount as user"] = func(args []string) error {
		_, err := Mount(Options{Source: args[0], Mountpoint: args[1]})
		if err == nil {
			return errors.New("an ordinary user without rights mounted")
		}
		os.Stdout.WriteString(err.Error())
		return nil
	}
}

func TestMountWithoutRights(t *testing.T) {
	requireRoot(t)
	st, err := os.Stat("/dev/fuse")
	require.NoError(t, err)
	if st.Mode().Perm()&0006 == 0006 {
		t.Skip("anybody may open /dev/fuse here")
	}
	dir, err := os.MkdirTemp("", testPrefix)
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	require.NoError(t, os.Chmod(dir, 0755))
	for _, name := range []string{"source", "mnt"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0755))
	}
	said := run(t, user(program("mount as user", filepath.Join(dir, "source"), filepath.Join(dir, "mnt")), alice,
		aliceOwn))
	assert.Contains(t, said, "/dev/fuse may not be opened")
}

func TestUnmount(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	is, err := IsMount(s.mnt)
	require.NoError(t, err)
	assert.True(t, is)
	is, err = IsMount(s.source)
	require.NoError(t, err)
	assert.False(t, is)
	mounts, err := Mounts()
	require.NoError(t, err)
	found := false
	for _, m := range mounts {
		if m.Mountpoint == s.mnt {
			found = true
			assert.Equal(t, s.source, m.Source)
			assert.Equal(t, "fuse.gaiafs", m.Type)
		}
	}
	assert.True(t, found)

	f, err := os.Create(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	err = Unmount(s.mnt)
	assert.ErrorIs(t, err, syscall.EBUSY)
	assert.ErrorContains(t, err, "is in use")
	assert.ErrorIs(t, s.Unmount(), syscall.EBUSY)
	_, err = f.WriteString("still in service")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	assert.ErrorContains(t, Unmount(s.source), "is not a mountpoint of gaiafs")
	assert.ErrorContains(t, Unmount(filepath.Join(s.mnt, "f")), "is not a mountpoint of gaiafs")
	require.NoError(t, Unmount(s.mnt))
	s.Wait()
	assert.NoError(t, s.Unmount())
}

func TestReadOnly(t *testing.T) {
	s := mount(t, func(o *Options) { o.ReadOnly = true })
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), []byte("x"), 0644))
	got, err := os.ReadFile(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	assert.Equal(t, "x", string(got))
	assert.ErrorIs(t, os.WriteFile(filepath.Join(s.mnt, "f"), nil, 0644), syscall.EROFS)
	assert.ErrorIs(t, os.Mkdir(filepath.Join(s.mnt, "d"), 0755), syscall.EROFS)
}

func TestMountinfo(t *testing.T) {
	mounts, err := parseMounts(strings.NewReader(
		`36 35 98:0 /root\040dir /mnt\011tab rw,nosuid,noatime,noexec master:1 - ext4 /dev/x\134y rw
37 35 0:50 / /mnt/b rw shared:3 master:2 - fuse.gaiafs /data/with\040space rw,user_id=0
short line
`))
	require.NoError(t, err)
	assert.Equal(t, []MountInfo{
		{number: 36, writable: true, strict: noSetID | noExec, Mountpoint: "/mnt\ttab", Type: "ext4",
			Source: `/dev/x\y`, Device: "98:0", root: "/root dir"},
		{number: 37, writable: true, Mountpoint: "/mnt/b", Type: "fuse.gaiafs", Source: "/data/with space",
			Device: "0:50", root: "/"},
	}, mounts)
}

// TestDescriptorsRunOut uses up the daemon's descriptors with open files. Then open fails and says why, everything else
// works, and close never fails.
func TestDescriptorsRunOut(t *testing.T) {
	s := mount(t)
	for i := range 40 {
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"+string(rune('A'+i))), []byte("content"), 0600))
	}
	var before syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(unix.RLIMIT_NOFILE, &before))
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	// The programs that use the mount are other processes with limits of their own.
	out := program("open many", s.mnt)
	low := before
	low.Cur = uint64(len(fds) + 40)
	pipe, err := out.StdoutPipe()
	require.NoError(t, err)
	out.Stderr = os.Stderr
	require.NoError(t, out.Start())
	require.NoError(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &low))
	defer func() { require.NoError(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()
	said := make([]byte, 100)
	n, _ := pipe.Read(said)
	assert.NoError(t, out.Wait())
	assert.Equal(t, "refused, then worked", string(said[:n]))
}

func init() {
	programs["open many"] = func(args []string) error {
		path := filepath.Join(args[0], "fA")
		var fds []int
		for len(fds) < 200 {
			fd, err := unix.Open(path, unix.O_RDWR, 0)
			if err == unix.EMFILE || err == unix.ENFILE {
				break
			}
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		if len(fds) == 0 || len(fds) == 200 {
			return errors.New("the descriptors of the daemon did not run out")
		}
		// Every open file still works.
		for _, fd := range fds {
			if _, err := unix.Pwrite(fd, []byte("C"), 0); err != nil {
				return err
			}
			if err := unix.Fsync(fd); err != nil {
				return err
			}
		}
		for i := range 40 {
			if err := unix.Access(filepath.Join(args[0], "f"+string(rune('A'+i))), unix.R_OK); err != nil {
				return err
			}
		}
		for _, fd := range fds {
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		// RELEASE comes after close has returned.
		for {
			fd, err := unix.Open(path, unix.O_RDWR, 0)
			if err == nil {
				unix.Close(fd)
				break
			}
			if err != unix.EMFILE {
				return err
			}
		}
		_, err := os.Stdout.WriteString("refused, then worked")
		return err
	}
}

func TestProgramsDoNotInheritTheConnection(t *testing.T) {
	s := mount(t)
	assert.NotContains(t, sh(t, s.source, "ls -l /proc/self/fd"), "/dev/fuse")
}

// TestReadRequests checks the size of the requests into which a large read is split.
func TestReadRequests(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root's mounts say how large a request may be")
	}
	s := mount(t)
	table, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); fields[1] == s.mnt {
			require.Contains(t, strings.Split(fields[3], ","), fmt.Sprintf("max_read=%d", maxRead))
			return
		}
	}
	t.Fatalf("%s is not mounted", s.mnt)
}

// TestTunedByRoot checks the settings that are made outside of the protocol.
func TestTunedByRoot(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(s.mnt, &st))
	for name, want := range map[string]int{"read_ahead_kb": readAhead, "max_ratio": dirtyShare} {
		got, err := os.ReadFile(fmt.Sprintf("/sys/class/bdi/%d:%d/%s", unix.Major(st.Dev), unix.Minor(st.Dev), name))
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprintln(want), string(got), name)
	}
}
