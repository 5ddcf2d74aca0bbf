package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mountTmpfs mounts a tmpfs on a new directory.
func mountTmpfs(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0755))
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", flags, "size=64M,mode=755"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

// plant makes what mount flags can forbid: a program with both set-id bits, one with capabilities, a device, and a
// symbolic link.
func plant(t *testing.T, dir string) {
	t.Helper()
	sh(t, dir, `cp "$(command -v id)" id; cp id capable; chmod 6755 id; mknod null c 1 3; chmod 666 null; ln -s id link; mkdir -m 2755 sub`)
	caps := []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	require.NoError(t, unix.Setxattr(filepath.Join(dir, "capable"), "security.capability", caps, 0))
}

// can returns what alice can do with the files that plant made.
func can(dir string) (things []string) {
	for _, thing := range []struct{ name, script string }{
		{"become root", `test "$(./id -u)" = 0`},
		{"execute", `./id`},
		{"open a device", `: < null`},
		{"follow a link", `: < link`},
	} {
		if user(shell(dir, thing.script), alice, aliceOwn).Run() == nil {
			things = append(things, thing.name)
		}
	}
	return things
}

// TestFlagsOfTheSourceHold mounts SOURCE with each flag, a directory below SOURCE with each flag, and one that appears
// while our mount exists. It compares what a user can do on our mount with what she can do in SOURCE.
func TestFlagsOfTheSourceHold(t *testing.T) {
	requireRoot(t)
	for name, flags := range map[string]uintptr{
		"none": 0, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC,
		"nosymfollow": unix.MS_NOSYMFOLLOW,
		"all":         unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW,
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", testPrefix)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
			require.NoError(t, os.Chmod(dir, 0755))
			mountTmpfs(t, dir, flags)
			plant(t, dir)
			s := mount(t, on(dir), func(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, -1 })
			assert.Equal(t, can(dir), can(s.mnt), "SOURCE")
			assert.EqualValues(t, strictnessOf(dir), strictnessOf(s.mnt))
		})
		t.Run("nested "+name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", testPrefix)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
			require.NoError(t, os.Chmod(dir, 0755))
			mountTmpfs(t, dir, 0)
			before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
			mountTmpfs(t, before, flags)
			plant(t, before)
			s := mount(t, on(dir), func(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, -1 })
			mountTmpfs(t, after, flags)
			plant(t, after)
			for _, sub := range []string{before, after} {
				want := can(sub)
				if flags&unix.MS_NOSYMFOLLOW != 0 {
					want = append(want, "follow a link") // as docs/security.md says
				}
				shown := filepath.Join(s.mnt, filepath.Base(sub))
				assert.Equal(t, want, can(shown), sub)
				caps := make([]byte, 20)
				_, err := unix.Getxattr(filepath.Join(shown, "capable"), "security.capability", caps)
				if flags&unix.MS_NOSUID != 0 {
					assert.Equal(t, unix.ENODATA, err)
				} else {
					assert.NoError(t, err)
				}

				// What is hidden stays.
				require.NoError(t, os.Chmod(filepath.Join(shown, "id"), 0644))
				var st unix.Stat_t
				require.NoError(t, unix.Stat(filepath.Join(sub, "id"), &st))
				mode := uint32(unix.S_IFREG | 0644)
				if flags&unix.MS_NOSUID != 0 {
					mode |= 06000
				}
				if flags&unix.MS_NOEXEC != 0 {
					mode |= 0111
				}
				assert.Equal(t, mode, st.Mode, "%o", st.Mode)
				require.NoError(t, unix.Stat(filepath.Join(shown, "sub"), &st))
				assert.EqualValues(t, unix.S_IFDIR|02755, st.Mode, "set-gid directories are about new files")
			}
			// A flag that is set later applies to names that are looked up again.
			if flags != 0 {
				return
			}
			require.NoError(t, os.Chmod(filepath.Join(before, "id"), os.ModeSetuid|0755))
			require.Contains(t, can(filepath.Join(s.mnt, "before")), "become root")
			require.NoError(t, unix.Mount("", before, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOSUID, ""))
			require.Eventually(t, func() bool {
				got := can(filepath.Join(s.mnt, "before"))
				return !assert.ObjectsAreEqual("become root", got[0])
			}, eventually, tick)
		})
	}
}
