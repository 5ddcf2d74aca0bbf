package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/fs"
)

func TestMountHelperOptions(t *testing.T) {
	for line, want := range map[string]string{
		"src mnt":                                          "",
		"src mnt -o rw":                                    "--read-only=false",
		"src mnt -o ro,allow_other":                        "--read-only=true --allow-other=true",
		"-r src mnt":                                       "--read-only=true",
		"src mnt -n -v -o gpus=none":                       "--gpus=none",
		"src mnt -ogpus=none":                              "--gpus=none",
		"src mnt -t fuse.gaiafs -o rw":                     "--read-only=false",
		`src mnt -o gpus="cuda:0,1",gpu_memory=4G`:         "--gpus=cuda:0,1 --gpu-memory=4G",
		"src mnt -o write-back-interval=1s,config=/x.toml": "--write-back-interval=1s --config=/x.toml",
		"src mnt -o _netdev,noauto,user,nofail,x-systemd.automount":   "",
		"src mnt -o defaults,noatime,X-mount.mkdir,comment=x,user=me": "",
		"src mnt -o nosuid,nodev,noexec":                              "--restrict=nosuid,nodev,noexec",
		"src mnt -s -o what,allow_other":                              "--allow-other=true",
	} {
		got, done, err := asHelper(strings.Fields(line))
		require.NoError(t, err, line)
		require.False(t, done)
		require.Equal(t, strings.Fields("mount --daemon "+want+" -- src mnt"), got, line)
	}
	for line, says := range map[string]string{
		"src mnt -o what":             `"what"`,
		"src mnt -o what=1":           `"what"`,
		"src mnt -o uid=5":            `"uid"`,
		"src mnt -o gpu_memory":       "gpu_memory=SIZE",
		"src mnt -o remount,ro":       "unmount it",
		"src mnt -o":                  "-o needs",
		"src mnt -x":                  "-x is not known",
		"--verbose src mnt":           "--verbose is not known",
		"src":                         "1 argument was given",
		"src mnt -t ext4":             "ext4",
		"src mnt -o daemon":           `"daemon"`,
		"src mnt -o ready_fd=3":       `"ready_fd"`,
		"src mnt -o allow_other,sync": `"sync"`,
	} {
		_, _, err := asHelper(strings.Fields(line))
		require.ErrorContains(t, err, says, line)
	}
	_, done, err := asHelper([]string{"-f", "src", "mnt"})
	require.NoError(t, err)
	require.True(t, done)
	for _, help := range []string{"-h", "--help"} {
		text := ""
		none := func([]string) int { t.Error("it runs nothing"); return exitFailure }
		tell := func(line string) { text += line }
		require.Zero(t, runHelper(&[]string{mountHelper, help}, none, tell))
		require.Contains(t, text, "mount -t fuse.gaiafs SOURCE MOUNTPOINT -o OPTIONS")
		require.Zero(t, runUnmountHelper([]string{unmountHelper, help}, none, tell))
		require.Contains(t, text, "umount MOUNTPOINT")
	}
	got, _, err := asHelper([]string{"--", "mnt"})
	require.Error(t, err, "%v", got)
}

func TestUnmountHelperOptions(t *testing.T) {
	for line, want := range map[string]string{
		"mnt":                             "-- mnt",
		"mnt -n -v -r -t fuse.gaiafs":     "-- mnt",
		"mnt -f":                          "--force -- mnt",
		"mnt -nvf -N /proc/1/ns/mnt":      "--force -- mnt",
		"mnt -N/proc/1/ns/mnt -tfuse":     "-- mnt",
		"-t fuse.gaiafs -n /mnt/models/x": "-- /mnt/models/x",
	} {
		got, lazy, err := asUnmountHelper(strings.Fields(line))
		require.NoError(t, err, line)
		require.False(t, lazy, line)
		require.Equal(t, strings.Fields("umount "+want), got, line)
	}
	_, lazy, err := asUnmountHelper([]string{"mnt", "-nl"})
	require.NoError(t, err)
	require.True(t, lazy)
	for line, says := range map[string]string{"mnt -x": "-x is not known", "": "0 arguments were given", "a b": "2 arguments were given"} {
		_, _, err := asUnmountHelper(strings.Fields(line))
		require.ErrorContains(t, err, says, line)
	}
}

// helperNamed runs this program under the name by which mount(8) or umount(8) calls it.
func helperNamed(t *testing.T, name string, args ...string) result {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	self, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Symlink(self, program))
	cmd := command(t)
	cmd.Path, cmd.Args = program, append([]string{program}, args...)
	return execute(t, cmd)
}

func helper(t *testing.T, args ...string) result {
	t.Helper()
	return helperNamed(t, mountHelper, args...)
}

// TestMountHelper mounts with the command lines of mount(8) and checks the exit codes that mount(8) expects.
func TestMountHelper(t *testing.T) {
	p := newPlace(t)
	r := helper(t, p.source, p.mountpoint, "-o", "rw,gpus=none,noexec,nosuid,nodev,x-systemd.automount,log_file="+p.log)
	require.Equal(t, 0, r.code, r.err)
	mounts, err := fs.Mounts()
	require.NoError(t, err)
	found := false
	for _, m := range mounts {
		found = found || m.Mountpoint == p.mountpoint
	}
	require.True(t, found)
	program := filepath.Join(p.mountpoint, "program")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))
	info, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for _, line := range strings.Split(string(info), "\n") {
		if strings.Contains(line, " "+p.mountpoint+" ") {
			for _, flag := range []string{"noexec", "nosuid", "nodev"} {
				require.Contains(t, line, flag)
			}
		}
	}
	again := helper(t, p.source, p.mountpoint, "-o", "gpus=none,log_file="+p.log)
	require.Equal(t, mountFailure, again.code)
	require.Contains(t, again.err, "already")
	require.Equal(t, mountUsage, helper(t, p.source, p.mountpoint, "-o", "what").code)
	require.Equal(t, mountUsage, helper(t, p.source, p.mountpoint, "-o", "gpu_memory=lots").code)
	r = gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
}

// TestUnmountHelper unmounts with the command lines of umount(8): it waits for the daemon, names programs that use the
// mount, and detaches.
func TestUnmountHelper(t *testing.T) {
	p := newPlace(t)
	mount := func() {
		r := helper(t, p.source, p.mountpoint, "-o", "gpus=none,log_file="+p.log)
		require.Equal(t, 0, r.code, r.err)
	}
	mount()
	f, err := os.Create(filepath.Join(p.mountpoint, "open"))
	require.NoError(t, err)
	defer f.Close()
	r := helperNamed(t, unmountHelper, p.mountpoint, "-n")
	require.Equal(t, mountFailure, r.code)
	require.Contains(t, r.err, "is in use by gaiafs.test (process "+strconv.Itoa(os.Getpid()))
	pid, err := daemonPID(p.mountpoint)
	require.NoError(t, err)
	r = helperNamed(t, unmountHelper, p.mountpoint, "-l")
	require.Equal(t, 0, r.code, r.err)
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { return endsWithin(pid, 0) }, 30*time.Second, 10*time.Millisecond)
	r = helperNamed(t, unmountHelper, p.mountpoint, "-l")
	require.Equal(t, mountFailure, r.code)
	require.Contains(t, r.err, "cannot be detached")
	mount()
	pid, err = daemonPID(p.mountpoint)
	require.NoError(t, err)
	r = helperNamed(t, unmountHelper, p.mountpoint, "-n", "-v")
	require.Equal(t, 0, r.code, r.err)
	require.True(t, endsWithin(pid, 0), "umount returned before the daemon had ended")
	require.Equal(t, mountUsage, helperNamed(t, unmountHelper).code)
}
