package fs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mappedFrom is the user on the host to which user 0 of the test's containers is mapped.
const mappedFrom = 100000

// inContainer makes a script run as root of a user namespace.
func inContainer(t *testing.T, dir, script string) *waiting {
	t.Helper()
	return startWaiting(t, dir, script, func(attr *syscall.SysProcAttr) {
		ids := []syscall.SysProcIDMap{{HostID: mappedFrom, Size: 65536}}
		attr.Cloneflags, attr.UidMappings, attr.GidMappings = syscall.CLONE_NEWUSER, ids, ids
		attr.GidMappingsEnableSetgroups = true
		attr.Credential = &syscall.Credential{}
	})
}

// idmap mounts a directory at another one, idmapped for the user namespace of a process.
func idmap(from, to string, pid int) error {
	users, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
	if err != nil {
		return err
	}
	defer users.Close()
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return err
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// TestIdmapped: root and a user of a user namespace work on an idmapped mount as on one of their own, and SOURCE has
// their files with the users that they have there.
func TestIdmapped(t *testing.T) {
	requireRoot(t)
	if !seesAllProcesses() {
		t.Skip("mounts cannot be idmapped in a PID namespace")
	}
	requireTool(t, "setpriv")
	everyMode(t, func(t *testing.T, s *scene) {
		if !s.fs.idmapped {
			t.Skip("needs Linux 6.12")
		}
		sh(t, s.source, "echo old >old; echo other >other; chown 7:8 other; mkdir dir; mkfifo fifo; chmod 644 old other")
		at, err := os.MkdirTemp("", testPrefix)
		require.NoError(t, err)
		defer os.Remove(at)
		w := inContainer(t, "/", `wait
			cd `+at+`; umask 022
			[ "$(stat -c %u:%g old)" = 0:0 ]; [ "$(stat -c %u:%g other)" = 7:8 ]
			echo new >new; mkdir sub; ln -s new link; mkfifo sub/fifo; ln new sub/hard; echo more >>old
			mv old sub/old; mv -T sub/hard hard; chown 5:6 other; chmod 6755 other; truncate -s 100 sub/old
			[ "$(stat -c %u:%g:%a other)" = 5:6:6755 ]
			fallocate -l 5000 sub/allocated; dd if=new of=sub/copy status=none; chmod 600 sub/copy; touch -d @5 new; rmdir dir; rm fifo
			chown -h 9:9 link; echo x >gone; rm gone
			umask 027; chmod 777 .; setpriv --reuid 3 --regid 4 --clear-groups sh -euc '
				echo mine >mine; mkdir -m 700 private; mv mine private/mine; echo more >>private/mine
				chmod 600 private/mine; ! cat sub/copy 2>/dev/null; ! chown 0 private/mine 2>/dev/null; ln -s x private/x'
			stat -c %u:%g private/mine`)
		require.NoError(t, idmap(s.mnt, at, w.pid))
		defer func() { require.NoError(t, unix.Unmount(at, unix.UMOUNT_NOFOLLOW)) }()
		assert.Equal(t, "3:4\n", w.goOn(t))
		owners := sh(t, s.source, "stat -c %n=%u:%g:%a new sub link hard sub/old other sub/allocated sub/copy sub/fifo "+
			"private private/mine private/x; cat private/mine sub/copy")
		assert.Equal(t, `new=0:0:644
sub=0:0:755
link=9:9:777
hard=0:0:644
sub/old=0:0:644
other=5:6:6755
sub/allocated=0:0:644
sub/copy=0:0:600
sub/fifo=0:0:644
private=3:4:700
private/mine=3:4:600
private/x=3:4:777
mine
more
new
`, owners)
		// The mount itself has the users of the host.
		assert.Equal(t, "5:6\n", sh(t, s.mnt, "stat -c %u:%g other"))
		// The host's root is nobody there, and cannot make files.
		assert.ErrorIs(t, os.WriteFile(filepath.Join(at, "root"), nil, 0o600), syscall.EOVERFLOW)
	})
}

// TestIdmappedRights: root of a user namespace is not the daemon's user for what a device or a flag needs.
func TestIdmappedRights(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	if !s.fs.idmapped {
		t.Skip("needs Linux 6.12, and the initial PID namespace")
	}
	require.NoError(t, os.Chmod(s.source, 0o777))
	at, err := os.MkdirTemp("", testPrefix)
	require.NoError(t, err)
	defer os.Remove(at)
	w := inContainer(t, "/", `wait
		cd `+at+`; echo x >f; chattr +d f; if chattr +i f 2>/dev/null; then echo immutable; fi
		exec 3>>f; wait
		echo y >&3`)
	require.NoError(t, idmap(s.mnt, at, w.pid))
	defer func() { require.NoError(t, unix.Unmount(at, unix.UMOUNT_NOFOLLOW)) }()
	_, err = w.in.Write([]byte("\n"))
	require.NoError(t, err)
	line, err := w.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	for _, of := range s.fs.files.all() {
		assert.EqualValues(t, mappedFrom, of.uid)
	}
	assert.Empty(t, w.goOn(t))
}

// TestFillCaller finds users of threads in /proc, and takes nobody for a thread that it does not see.
func TestFillCaller(t *testing.T) {
	requireRoot(t)
	cmd := user(shell("/", "read line"), 1234, 1235)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	for _, c := range []struct{ pid, uid, gid int }{
		{cmd.Process.Pid, 1234, 1235}, {os.Getpid(), 0, 0}, {0, nobody, nobody}, {1 << 30, nobody, nobody}} {
		who := fuse.Caller{Owner: fuse.Owner{Uid: unknownUser, Gid: unknownUser}, Pid: uint32(c.pid)}
		fillCaller(&who)
		assert.Equal(t, fuse.Owner{Uid: uint32(c.uid), Gid: uint32(c.gid)}, who.Owner, strconv.Itoa(c.pid))
	}
	who := fuse.Caller{Owner: fuse.Owner{Uid: 5, Gid: 6}, Pid: uint32(cmd.Process.Pid)}
	fillCaller(&who)
	assert.Equal(t, fuse.Owner{Uid: 5, Gid: 6}, who.Owner)
	require.NoError(t, errors.Join(in.Close()))
	_ = cmd.Wait()
}
