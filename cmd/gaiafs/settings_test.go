package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

func environment(values map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := values[name]; return v, ok }
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestPrecedenceFlagEnvironmentFileDefault(t *testing.T) {
	config := write(t, `
gpus = "emulated:3"
gpu-memory = "1G"
host-memory = 4194304
write-back-interval = "5s"
read-only = true
`)
	s := newSettings()
	f := s.flags()
	require.NoError(t, f.Parse([]string{"--gpus=emulated:1"}))
	require.NoError(t, complete(f, config, environment(map[string]string{
		"GAIAFS_GPUS": "none", "GAIAFS_GPU_MEMORY": "2G", "GAIAFS_WRITE_BACK": "true"})))
	require.Equal(t, "emulated:1", s.gpus.String(), "the flag")
	require.Equal(t, size(2<<30), s.gpuMemory.size, "the environment")
	require.True(t, s.writeBack, "the environment")
	require.Equal(t, size(4<<20), s.hostMemory, "the file")
	require.Equal(t, 5*time.Second, s.writeBackInterval.Duration, "the file")
	require.True(t, s.readOnly, "the file")
	require.Equal(t, time.Second, s.attrTimeout.Duration, "the default")
	require.Equal(t, "info", s.logLevel.word, "the default")
}

func TestUserConfigCountsMoreThanTheSystems(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "gaiafs"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gaiafs", "config.toml"), []byte(`log-level = "warn"`), 0o600))
	s := newSettings()
	require.NoError(t, complete(s.flags(), "", environment(map[string]string{"XDG_CONFIG_HOME": dir})))
	require.Equal(t, "warn", s.logLevel.word)
	require.Equal(t, "/home/me/.config", userConfig(environment(map[string]string{"HOME": "/home/me",
		"XDG_CONFIG_HOME": "relative"})))
}

func TestEverySettingHasAVariable(t *testing.T) {
	require.Contains(t, settingNames(), "write-back-interval")
	require.Equal(t, "GAIAFS_WRITE_BACK_INTERVAL", variable("write-back-interval"))
	texts := map[string]string{"GAIAFS_LOG_FILE": "/log", "GAIAFS_SOCKET": "/socket", "GAIAFS_DEBUG_FUSE": "1",
		"GAIAFS_LOG_FORMAT": "JSON"}
	s := newSettings()
	require.NoError(t, complete(s.flags(), "/dev/null", environment(texts)))
	require.Equal(t, "/log", s.logFile)
	require.Equal(t, "/socket", s.socket)
	require.True(t, s.debugFuse)
	require.Equal(t, "json", s.logFormat.word)
}

func TestWrongSettingsNameWhereTheyAre(t *testing.T) {
	for content, says := range map[string]string{
		"read-only = true\n\nread-olny = true\n":     ":3: read-olny: there is no such setting",
		"gpus = \"none\"\n[mount]\nread-only = true": ":2: mount: there is no such setting",
		"\n\"a,b\" = 1":                          ":2: a,b: there is no such setting",
		"\"a\\\"b\" = 1":                         ":1: a\"b: there is no such setting",
		"# none\ngpu-memory = \"lots\"":          ":2: gpu-memory: \"lots\" is not a size",
		"log-level = \"info\"\nattr-timeout = 3": ":2: attr-timeout: \"3\" is not a duration",
		"read-only = \"perhaps\"":                ":1: read-only: \"perhaps\" is neither true nor false",
		"gpu-memory = [1, 2]":                    ":1: gpu-memory: the value must be a text, a whole number, true or false",
		"gpus = 'none'\ngpus = 'auto'":           ":2: ",
		"gpus = 'none'\n\nhost-memory 5":         ":3: ",
		"daemon = true":                          ":1: daemon: there is no such setting",
	} {
		path := write(t, content)
		s := newSettings()
		err := complete(s.flags(), path, environment(nil))
		var usage usageError
		require.ErrorAs(t, err, &usage, "%q", content)
		require.ErrorContains(t, err, path+says, "%q", content)
	}
	s := newSettings()
	err := complete(s.flags(), "/dev/null", environment(map[string]string{"GAIAFS_ENTRY_TIMEOUT": "-1s"}))
	require.EqualError(t, err, `GAIAFS_ENTRY_TIMEOUT: "-1s" is too short; the minimum is 0s`)
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]size{"0": 0, "512": 512, "1k": 1024, "512M": 512 << 20, "1.5G": 3 << 29,
		"2GiB": 2 << 30,
		"1 GB": 1e9, "3tib": 3 << 40, " 7 b ": 7} {
		var s size
		require.NoError(t, s.Set(text), text)
		require.Equal(t, want, s, text)
	}
	for _, text := range []string{"", "G", "-1", "1X", "1e30", "9999999T", "NaN", "1..2", "0x10", "1G2"} {
		var s size
		require.Error(t, s.Set(text), text)
	}
	s := size(3 << 29)
	require.Equal(t, "1.5GiB", s.String())
}

func TestDevices(t *testing.T) {
	for text, want := range map[string]string{"auto": "auto", "NONE": "none", "emulated": "emulated",
		"emulated:160": "emulated:160",
		"cuda":         "cuda", "cuda:0,3": "cuda:0,3", "Emulated:2,CUDA:0,3": "emulated:2,cuda:0,3"} {
		var g gpuChoice
		require.NoError(t, g.Set(text), text)
		require.Equal(t, want, g.String(), text)
	}
	for _, text := range []string{"", "emulated:", "emulated:0", "emulated:161", "emulated:x", "cuda:-", "cuda:0,0",
		"cuda:255", "cuda:1,", "auto:1", "none:0", "rocm:0", "cuda,cuda:1", "auto,cuda", "cuda:0,none", "emulated:1,",
		",cuda"} {
		var g gpuChoice
		require.Error(t, g.Set(text), text)
	}

	open := func(text string, memory int64) []gpubackend.Device {
		var g gpuChoice
		require.NoError(t, g.Set(text))
		devices, _, err := g.open(memory, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		return devices
	}
	require.Empty(t, open("none", 0))
	devices := open("emulated:160", 0)
	require.Len(t, devices, 160)
	require.GreaterOrEqual(t, devices[159].Info().Memory, int64(64<<20))
	require.Equal(t, 159, devices[159].Info().Ordinal)
	require.NoError(t, closeDevices(devices))
	devices = open("emulated", 100<<20)
	require.Equal(t, int64(100<<20), devices[0].Info().Memory)
	require.NoError(t, closeDevices(devices))
	devices = open("auto", 0)
	require.NotEmpty(t, devices)
	require.NoError(t, closeDevices(devices))
	require.Positive(t, availableMemory())
	require.Equal(t, int64(4<<30), emulatedMemory(1<<40, 1))
	require.Equal(t, int64(1<<30), emulatedMemory(4<<30, 2))
}

func TestDaemonNames(t *testing.T) {
	require.Equal(t, `mnt-a\x2db.log`, logName("/mnt/a-b"))
	require.NotEqual(t, logName("/mnt/a-b"), logName("/mnt/a/b"))
	long := make([]byte, 3000)
	for i := range long {
		long[i] = 'x'
	}
	require.Less(t, len(logName("/"+string(long))), 255)
	require.False(t, isJournal(os.Stderr, ""))
	require.False(t, isJournal(os.Stderr, "1:2"))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(os.Stderr.Fd()), &st))
	require.True(t, isJournal(os.Stderr, fmt.Sprintf("%d:%d", st.Dev, st.Ino)))
}
