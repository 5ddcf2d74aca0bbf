package fs

import (
	"encoding/binary"
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

const (
	alice, bob       = 1001, 1002
	staff, wheel     = 2001, 2002
	aliceOwn, bobOwn = 1001, 1002
)

// "make everything" makes one file of each kind in a directory, with the umask in the second argument, in octal.
func init() {
	programs["make everything"] = func(args []string) error {
		var umask int
		for _, c := range args[1] {
			umask = umask<<3 | int(c-'0')
		}
		unix.Umask(umask)
		at := func(name string) string { return filepath.Join(args[0], name) }
		fd, err := unix.Open(at("file"), unix.O_CREAT|unix.O_RDWR|unix.O_EXCL, 0666)
		if err != nil {
			return err
		}
		unix.Close(fd)
		if fd, err = unix.Open(at("setid"), unix.O_CREAT|unix.O_WRONLY, 06777); err != nil {
			return err
		}
		unix.Close(fd)
		if err := unix.Mkdir(at("dir"), 0777); err != nil {
			return err
		}
		if err := unix.Mkfifo(at("fifo"), 0666); err != nil {
			return err
		}
		if err := unix.Mknod(at("node"), unix.S_IFREG|0640, 0); err != nil {
			return err
		}
		if err := unix.Symlink("x", at("link")); err != nil {
			return err
		}
		if fd, err = unix.Open(args[0], unix.O_TMPFILE|unix.O_RDWR, 0666); err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Linkat(unix.AT_FDCWD, procPath(fd), unix.AT_FDCWD, at("temporary"), unix.AT_SYMLINK_FOLLOW)
	}
}

// acl encodes a POSIX ACL as an extended attribute (acl(5), linux/posix_acl_xattr.h).
func acl(entries ...[3]uint32) []byte {
	p := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		p = binary.LittleEndian.AppendUint16(p, uint16(e[0]))
		p = binary.LittleEndian.AppendUint16(p, uint16(e[1]))
		p = binary.LittleEndian.AppendUint32(p, e[2])
	}
	return p
}

const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclMask     = 0x10
	aclOther    = 0x20
	noID        = 0xffffffff
)

// defaultACL lets bob read and write new files in a directory, regardless of the umask.
var defaultACL = acl([3]uint32{aclUserObj, 7, noID}, [3]uint32{aclUser, 6, bob}, [3]uint32{aclGroupObj, 5, noID},
	[3]uint32{aclMask, 7, noID}, [3]uint32{aclOther, 0, noID})

// TestCreationAsOnTheBacking makes the same files on the mount and on the bare backing filesystem, and compares owner,
// group, mode and ACLs.
func TestCreationAsOnTheBacking(t *testing.T) {
	requireRoot(t)
	prepare := map[string]func(t *testing.T, dir string){
		"plain":  func(*testing.T, string) {},
		"sticky": func(t *testing.T, dir string) { require.NoError(t, unix.Chmod(dir, 01777)) },
		"setgid": func(t *testing.T, dir string) {
			require.NoError(t, os.Chown(dir, 0, staff))
			require.NoError(t, unix.Chmod(dir, 02777))
		},
		"default": func(t *testing.T, dir string) {
			require.NoError(t, unix.Setxattr(dir, "system.posix_acl_default", defaultACL, 0))
		},
		"default+g": func(t *testing.T, dir string) {
			require.NoError(t, os.Chown(dir, 0, wheel))
			require.NoError(t, unix.Setxattr(dir, "system.posix_acl_default", defaultACL, 0))
			require.NoError(t, unix.Chmod(dir, 02777))
		},
	}
	s := mount(t)
	for name, prepare := range prepare {
		for _, umask := range []string{"000", "022", "077", "027"} {
			t.Run(name+" umask "+umask, func(t *testing.T) {
				var lists [2][]string
				for i, base := range []string{s.mnt, s.source} {
					dir := filepath.Join(base, strings.ReplaceAll(t.Name(), "/", "_")+[]string{" mount", " bare"}[i])
					require.NoError(t, os.Mkdir(dir, 0777))
					require.NoError(t, unix.Chmod(dir, 0777))
					prepare(t, dir)
					run(t, user(program("make everything", dir, umask), alice, aliceOwn, staff))
					lists[i] = describe(t, dir)
				}
				assert.Equal(t, lists[1], lists[0])
				assert.Len(t, lists[0], 7)
			})
		}
	}
}

// describe returns the attributes of each entry of a directory that must be equal.
func describe(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var all []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(path, &st))
		line := []string{e.Name(), syscallMode(st.Mode), itoa(st.Uid), itoa(st.Gid)}
		for _, attr := range []string{"system.posix_acl_access", "system.posix_acl_default"} {
			buf := make([]byte, 1000)
			n, err := unix.Lgetxattr(path, attr, buf)
			if err == nil {
				line = append(line, string(buf[:n]))
			}
		}
		all = append(all, strings.Join(line, " "))
	}
	return all
}

func itoa(n uint32) string        { return string(binary.BigEndian.AppendUint32(nil, n)) }
func syscallMode(m uint32) string { return string(binary.BigEndian.AppendUint32(nil, m)) }

func TestPermissionChecks(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	sh(t, s.mnt, `
		mkdir -m 0755 closed; mkdir -m 0777 open; mkdir -m 01777 sticky; mkdir -m 0770 team; chgrp 2001 team
		echo secret > closed/secret; chmod 600 closed/secret
		echo hers > sticky/hers; chown 1001:1001 sticky/hers; chmod 666 sticky/hers
		echo team > team/file; chmod 660 team/file; chgrp 2001 team/file`)
	allowed := func(want bool, uid uint32, groups []uint32, script string) {
		t.Helper()
		out, err := user(shell(s.mnt, script), uid, groups...).CombinedOutput()
		assert.Equal(t, want, err == nil, "uid %d: %s: %s", uid, script, out)
	}
	allowed(false, alice, []uint32{aliceOwn}, "cat closed/secret")
	allowed(false, alice, []uint32{aliceOwn}, "echo x > closed/new")
	allowed(false, alice, []uint32{aliceOwn}, "rm -f closed/secret")
	allowed(false, alice, []uint32{aliceOwn}, "chmod 777 closed/secret")
	allowed(true, alice, []uint32{aliceOwn}, "echo x > open/mine; chmod 600 open/mine; cat open/mine")
	allowed(false, bob, []uint32{bobOwn}, "cat open/mine")
	allowed(true, bob, []uint32{bobOwn}, "mv open/mine open/his")
	allowed(false, bob, []uint32{bobOwn}, "mv sticky/hers sticky/his")
	allowed(false, bob, []uint32{bobOwn}, "rm -f sticky/hers")
	allowed(true, bob, []uint32{bobOwn}, "echo more >> sticky/hers")
	allowed(true, alice, []uint32{aliceOwn}, "rm sticky/hers")
	// Access by a supplementary group, which the daemon does not know.
	allowed(false, bob, []uint32{bobOwn}, "cat team/file")
	allowed(true, bob, []uint32{bobOwn, staff}, "cat team/file; echo x > team/new; echo y >> team/file")
	allowed(false, bob, []uint32{bobOwn, staff}, "chown 1002 team/file")
	allowed(true, bob, []uint32{bobOwn, staff}, "chgrp 2001 team/new")
	allowed(false, bob, []uint32{bobOwn, staff}, "chgrp 2002 team/new")
	require.NoError(t, unix.Setxattr(filepath.Join(s.mnt, "closed/secret"), "system.posix_acl_access",
		acl([3]uint32{aclUserObj, 6, noID}, [3]uint32{aclUser, 4, alice}, [3]uint32{aclGroupObj, 0, noID},
			[3]uint32{aclMask, 4, noID}, [3]uint32{aclOther, 0, noID}), 0))
	allowed(true, alice, []uint32{aliceOwn}, "cat closed/secret")
	allowed(false, bob, []uint32{bobOwn}, "cat closed/secret")
	allowed(false, alice, []uint32{aliceOwn}, "mknod open/null c 1 3")
}

func TestSetIDBitsAreCleared(t *testing.T) {
	requireRoot(t)
	changes := map[string]string{
		"write":              `printf x | dd of=f conv=notrunc status=none`,
		"append":             `echo x >> f`,
		"truncate":           `truncate -s 1 f`,
		"open with truncate": `: > f`,
		"fallocate":          `fallocate -l 8192 f`,
		"chown":              `chgrp 2001 f`,
		"copy_file_range":    "",
	}
	for _, mode := range []struct {
		name   string
		change func(*Options)
	}{{"write-through", func(*Options) {}}, {"write-back", writeBack}, {"passthrough", passThrough}} {
		for name, script := range changes {
			t.Run(mode.name+"/"+name, func(t *testing.T) {
				s := mount(t, mode.change)
				mount, bare := filepath.Join(s.mnt, "m"), filepath.Join(s.source, "b")
				for _, dir := range []string{mount, bare} {
					require.NoError(t, os.Mkdir(dir, 0777))
					// If the group may not execute the file, the group's bit stays for members of the group.
					for _, file := range []struct{ mode, group int }{{06777, aliceOwn}, {06767, aliceOwn},
						{06767, staff}, {06767, wheel}} {
						for _, uid := range []int{alice, 0} {
							path := filepath.Join(dir, "f")
							require.NoError(t, os.WriteFile(path, []byte("content"), 0777))
							require.NoError(t, os.Chown(path, alice, file.group))
							require.NoError(t, unix.Chmod(path, uint32(file.mode)))
							cmd := shell(dir, script)
							if name == "copy_file_range" {
								cmd = program("copy within", path)
							}
							if uid != 0 {
								cmd = user(cmd, uint32(uid), aliceOwn, staff)
							}
							run(t, cmd)
							var now unix.Stat_t
							require.NoError(t, unix.Stat(path, &now)) // at once, not when the kernel asks again
							who := fmt.Sprintf("%#o of group %d by %d", file.mode, file.group, uid)
							require.NoError(t, os.Rename(path, filepath.Join(dir, who)))
							require.NoError(t, os.WriteFile(path+" seen", nil, os.FileMode(now.Mode&0777)))
							require.NoError(t, unix.Chmod(path+" seen", now.Mode&07777))
							require.NoError(t, os.Rename(path+" seen", filepath.Join(dir, "seen "+who)))
						}
					}
				}
				assert.Equal(t, modes(t, bare), modes(t, filepath.Join(s.source, "m")), "in SOURCE")
				assert.Equal(t, modes(t, bare), modes(t, mount), "on the mount")
			})
		}
	}
}

// modes returns the permission bits of each entry of dir.
func modes(t *testing.T, dir string) map[string]uint32 {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	m := map[string]uint32{}
	for _, e := range entries {
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(filepath.Join(dir, e.Name()), &st))
		m[e.Name()] = st.Mode & 07777
	}
	return m
}

func TestCapabilitiesOfAFileAreClearedByWriting(t *testing.T) {
	requireRoot(t)
	everyMode(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(path, []byte("x"), 0755))
		// VFS_CAP_REVISION_2, cap_net_raw permitted and effective.
		caps := []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		require.NoError(t, unix.Setxattr(path, "security.capability", caps, 0))
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.WriteString("y")
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		require.NoError(t, f.Close())
		_, err = unix.Getxattr(filepath.Join(s.source, "f"), "security.capability", caps)
		assert.Equal(t, syscall.ENODATA, err)
	})
}

// TestACLClearsSetGID follows acl(5) and chmod(2): if a user outside of the file's group sets an ACL, the bit is
// cleared.
func TestACLClearsSetGID(t *testing.T) {
	requireRoot(t)
	s := mount(t)
	var got [2]uint32
	for i, dir := range []string{s.mnt, s.source} {
		path := filepath.Join(dir, []string{"m", "b"}[i])
		require.NoError(t, os.WriteFile(path, nil, 0755))
		require.NoError(t, os.Chown(path, alice, wheel))
		require.NoError(t, unix.Chmod(path, 02755))
		run(t, user(program("set ACL", path), alice, aliceOwn))
		var st unix.Stat_t
		require.NoError(t, unix.Stat(path, &st))
		got[i] = st.Mode
	}
	assert.Equal(t, got[1], got[0])
	assert.Zero(t, got[0]&unix.S_ISGID)
}

func init() {
	programs["set ACL"] = func(args []string) error {
		return unix.Setxattr(args[0], "system.posix_acl_access", acl([3]uint32{aclUserObj, 7, noID},
			[3]uint32{aclUser, 6, bob},
			[3]uint32{aclGroupObj, 5, noID}, [3]uint32{aclMask, 7, noID}, [3]uint32{aclOther, 5, noID}), 0)
	}
}

func init() {
	programs["copy within"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		from, to := int64(0), int64(8192)
		_, err = unix.CopyFileRange(int(f.Fd()), &from, int(f.Fd()), &to, 4, 0)
		return err
	}
}
