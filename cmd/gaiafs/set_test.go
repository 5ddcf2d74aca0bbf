package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache"
)

// Settings change while the mount is in use: all that are named, or none. The status shows them.
func TestSet(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=16M", "--pinned-memory=8M", "--allow-other")
	path := filepath.Join(s.mountpoint, "weights")
	require.NoError(t, os.WriteFile(path, make([]byte, 12*mib), 0o644))
	r := gaiafsCommand(t, "set", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, `(?s)gpu-memory +16MiB.*pinned-memory +8.0MiB.*eviction +allocated.*log-level +info`, r.out)
	r = gaiafsCommand(t, "set", s.mountpoint, "eviction=LFU", "placement=threshold",
		"placement-penalty=2", "transfers=shares", "log-level=debug", "user-share=50%")
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, `(?s)user-share +50% +was 75%.*eviction +lfu +was allocated.*transfers +shares +was fcfs`, r.out)
	require.NotContains(t, r.out, "gpu-memory")

	status := func() (all statusDocument) {
		r := gaiafsCommand(t, "status", "--json", s.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		require.NoError(t, json.Unmarshal([]byte(r.out), &all))
		return all
	}
	now := status()
	for _, d := range now.Devices {
		require.Equal(t, "lfu", d.Eviction)
		require.Equal(t, "threshold", d.Placement)
		require.Equal(t, "shares", d.Transfers)
	}
	require.Equal(t, []string{"user-share", "eviction", "placement", "placement-penalty", "transfers",
		"log-level"}, now.Mount.Changed)
	require.Equal(t, "lfu", now.Mount.Settings["eviction"])

	require.Equal(t, exitOK, gaiafsCommand(t, "warm", path).code)
	f, err := os.Open(path)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	r = gaiafsCommand(t, "set", s.mountpoint, "gpu-memory=2M", "pinned-memory=0")
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, "gpu-memory: gpu0 still uses 4.0 MiB, until programs unmap it")
	now = status()
	require.EqualValues(t, 2*mib, now.Devices[0].MemoryBytes)
	require.EqualValues(t, 4*mib, now.Devices[0].UsedBytes)
	require.Equal(t, "gaiafs set", now.Devices[0].MemoryWhy)
	require.LessOrEqual(t, now.Devices[1].UsedBytes, int64(2*mib))
	require.Zero(t, now.PinnedLimit)
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	require.Equal(t, exitOK, gaiafsCommand(t, "set", s.mountpoint, "gpu-memory=32M").code)
	require.Contains(t, gaiafsCommand(t, "status", s.mountpoint).out, "changed since: gpu-memory=32MiB, pinned-memory=")
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", path).code)

	for says, setting := range map[string]string{
		"there is no setting \"colour\"; these can be changed: gpu-memory, pinned-memory,": "colour=red",
		"host-memory is fixed when the mount is made; these can be changed: gpu-memory":    "host-memory=1G",
		"eviction: \"fifo\" is none of allocated, lru":                                     "eviction=fifo",
		"placement: \"lazy\" is none of eager, threshold":                                  "placement=lazy",
		"placement-threshold: \"0\" is not a whole number from 1 to 1000000":               "placement-threshold=0",
		"\"eviction\" is not NAME=VALUE":                                                   "eviction",
		"gpu-memory: \"much\" is not a size":                                               "gpu-memory=much",
		"gpu-memory: 1.0MiB is too little: a device needs at least 2MiB":                   "gpu-memory=1M",
		"gpu-memory: device 0: a budget of 1000 TiB is more than the device has":           "gpu-memory=1000T",
	} {
		r := gaiafsCommand(t, "set", s.mountpoint, "transfers=fcfs", setting)
		code := exitUsage
		if setting == "gpu-memory=1000T" { // a size, but there is no such memory
			code = exitFailure
		}
		require.Equal(t, code, r.code, setting)
		require.Contains(t, r.err, "gaiafs: "+says)
	}
	require.Equal(t, "shares", status().Mount.Settings["transfers"], "if one is wrong, none is changed")
	require.Contains(t, gaiafsCommand(t, "set", s.mountpoint, "eviction=lru", "eviction=lfu").err,
		"eviction is given twice")
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	others := execute(t, asUser(t, 65534, command(t, "set", s.mountpoint, "eviction=lru")))
	require.Contains(t, others.err, "only root and the user who mounted")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// TestSetReadsTheCallersFile: the caller reads the files that settings name, up to a limit, and the daemon opens none.
// A file that never answers stops only its reader.
func TestSetReadsTheCallersFile(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1")
	set := func(input string, setting string) result {
		cmd := command(t, "set", s.mountpoint, setting)
		cmd.Stdin = strings.NewReader(input)
		return execute(t, cmd)
	}
	for _, name := range []string{"priorities", "tenants"} {
		r := set("this is ] no toml", name+"=/dev/stdin")
		require.Equal(t, exitUsage, r.code, r.err)
		require.Contains(t, r.err, name+": /dev/stdin: line 1")
		r = set("", name+"=/dev/zero")
		require.Equal(t, exitUsage, r.code, r.err)
		require.Contains(t, r.err, "/dev/zero is longer than 1048576 bytes")
	}
	r := set("[[file]]\npath = \"a\"\n", "priorities=/dev/stdin")
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, "priorities +/dev/stdin +was none", r.out)
	long := ""
	for i := range 1000 {
		long += fmt.Sprintf("[[file]]\npath = \"f%d\"\n", i)
	}
	file := filepath.Join(t.TempDir(), "long.toml")
	require.NoError(t, os.WriteFile(file, []byte(long), 0o600))
	r = set("", "priorities="+file)
	require.Equal(t, exitOK, r.code, r.err)

	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	waits := command(t, "set", s.mountpoint, "priorities="+fifo)
	require.NoError(t, waits.Start())
	_, err := gaiafs.Set(t.Context(), s.mountpoint, "priorities="+fifo)
	require.ErrorIs(t, err, syscall.EINVAL)
	require.ErrorContains(t, err, "the daemon opens no file for a client")
	r = set("", "priorities=none")
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, waits.Process.Kill())
	_ = waits.Wait()
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// TestFilesThatCannotBeRead: a file of settings without an end ends with an error. So does one with --daemon that only
// the first process could read.
func TestFilesThatCannotBeRead(t *testing.T) {
	p := newPlace(t)
	for _, flag := range []string{"--config", "--tenants", "--priorities"} {
		r := gaiafsCommand(t, "mount", flag+"=/dev/zero", p.source, p.mountpoint)
		require.Equal(t, exitUsage, r.code, r.err)
		require.Contains(t, r.err, "/dev/zero is longer than 1048576 bytes")
		r = gaiafsCommand(t, "mount", "--daemon", flag+"=/dev/stdin", p.source, p.mountpoint)
		require.Equal(t, exitUsage, r.code, r.err)
		require.Contains(t, r.err, flag+" with --daemon: /dev/stdin is no file that another process can read")
	}
}

// An automatic budget follows what other programs use of a device. What nobody maps is evicted, what programs map
// stays, and status says why. When the other programs have gone, it grows again.
func TestLiveBudget(t *testing.T) {
	taken := filepath.Join(t.TempDir(), "taken")
	say := func(bytes string) { require.NoError(t, os.WriteFile(taken, []byte(bytes), 0o644)) }
	t.Setenv(takenVariable, taken)
	s := mountForeground(t, "--gpus=emulated:1")
	device := func() pagecache.DeviceStatus {
		r := gaiafsCommand(t, "status", "--json", s.mountpoint)
		var all statusDocument
		require.NoError(t, json.Unmarshal([]byte(r.out), &all), r.err)
		return all.Devices[0]
	}
	until := func(is func(d pagecache.DeviceStatus) bool) {
		t.Helper()
		require.Eventually(t, func() bool { return is(device()) }, time.Minute, 50*time.Millisecond)
	}
	path := filepath.Join(s.mountpoint, "weights")
	require.NoError(t, os.WriteFile(path, make([]byte, 12*mib), 0o644))
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", path).code)
	f, err := os.Open(path)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	all := device().MemoryBytes
	require.Empty(t, device().MemoryWhy)

	say(fmt.Sprint(all / 3 * 4)) // all memory of the device
	until(func(d pagecache.DeviceStatus) bool { return d.UsedBytes == 4*mib && d.MemoryBytes == 4*mib })
	require.Contains(t, device().MemoryWhy, "others use the device too, and 0 B are free; programs map the rest")
	require.Contains(t, gaiafsCommand(t, "status", s.mountpoint).out, "gpu0 memory: auto, of ")
	require.Contains(t, gaiafsCommand(t, "set", s.mountpoint).out, "gpu-memory: gpu0 has 4.0 MiB: auto, of ")
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	until(func(d pagecache.DeviceStatus) bool { return d.MemoryBytes == 2*mib })

	say("0")
	until(func(d pagecache.DeviceStatus) bool { return d.MemoryBytes == all && d.MemoryWhy == "" })
	require.Equal(t, exitOK, gaiafsCommand(t, "set", s.mountpoint, "gpu-memory=16M").code)
	require.EqualValues(t, 16*mib, device().MemoryBytes)
	require.Equal(t, exitOK, gaiafsCommand(t, "set", s.mountpoint, "gpu-memory=auto").code)
	until(func(d pagecache.DeviceStatus) bool { return d.MemoryBytes == all })
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func TestSetIsCompleted(t *testing.T) {
	words, _ := completeSet(nil, []string{"/mnt"}, "ev")
	require.Equal(t, []string{"eviction=\twhich extent goes first when a device is full; docs/eviction.md describes the rules"}, words)
	words, _ = completeSet(nil, []string{"/mnt"}, "log-level=")
	require.Equal(t, []string{"log-level=debug", "log-level=info", "log-level=warn", "log-level=error"}, words)
}

// Reading the settings changes none.
func TestSettingsAreDescribedOnly(t *testing.T) {
	given := newSettings()
	require.NoError(t, given.flags().Parse([]string{"--read-only", "--allow-other", "--metrics-token-file=t",
		"--gpu-memory=4G"}))
	s := &service{plan: &mountPlan{settings: given}, live: liveState{now: *given}}
	values, changed := s.describeSettings()
	require.Empty(t, changed)
	require.Equal(t, "4.0GiB", values["gpu-memory"])
	require.Equal(t, []any{true, true, "t"}, []any{given.readOnly, given.allowOther, given.metricsToken})
	now := s.settingsNow()
	require.Equal(t, []any{true, true, "t"}, []any{now.readOnly, now.allowOther, now.metricsToken})
}
