package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

func TestTenantsFile(t *testing.T) {
	list, err := parseTenants(`
[[tenant]]
user = "root"
weight = 2.5
guaranteed = "2G"
[[tenant]]
user = 1234
maximum = "64M"
[[tenant]]
cgroup = "/slurm/job_1"
maximum-pinned = "1G"
[[tenant]]
directory = "models/large"
[[tenant]]
name = "night shift"
users = ["root", 7]
[[tenant]]
name = "all"
users = ["*"]
`)
	require.NoError(t, err)
	require.Equal(t, []pagecache.Tenant{{ID: "user 0", Weight: 2.5, Guaranteed: 2 << 30},
		{ID: "user 1234", Weight: 1, Most: 64 << 20},
		{ID: "cgroup /slurm/job_1", Weight: 1, MostPinned: 1 << 30}, {ID: "directory models/large", Weight: 1},
		{ID: "named night shift", Weight: 1, Users: []uint32{0, 7}},
		{ID: "named all", Weight: 1, Everyone: true}}, list)
	for says, text := range map[string]string{
		"there is no user \"nobody-at-all\"":                                       "[[tenant]]\nuser = \"nobody-at-all\"",
		"the weight 0 is not positive":                                             "[[tenant]]\nuser = 0\nweight = 0",
		"tenant 1: it needs either a user, or a cgroup, or a directory, or a name": "[[tenant]]\nweight = 1",
		"tenant 3: it needs either":                                                "[[tenant]]\nuser = 1\n[[tenant]]\nuser = 2\n[[tenant]]\nuser = 3\nname = \"x\"\nusers = [3]",
		"the name \"x\" needs users":                                               "[[tenant]]\nname = \"x\"",
		"the directory \"/a\" is not a path":                                       "[[tenant]]\ndirectory = \"/a\"",
		"the directory \"a/../..\" is not":                                         "[[tenant]]\ndirectory = \"a/../..\"",
		"users are for a tenant with a name":                                       "[[tenant]]\nuser = 1\nusers = [2]",
		"the name \"\\x1b\" is longer":                                             "[[tenant]]\nname = \"\\u001b\"\nusers = [\"*\"]",
		"tenant 2: it needs either":                                                "[[tenant]]\nuser = 1\n[[tenant]]\nuser = 1\ncgroup = \"/a\"",
		"not a path as in /proc/PID/cgroup":                                        "[[tenant]]\ncgroup = \"a/\"",
		"there are two tenants \"user 1\"":                                         "[[tenant]]\nuser = 1\n[[tenant]]\nuser = 1",
		"there is no \"tenant.share\"":                                             "[[tenant]]\nuser = 1\nshare = 3",
		"maximum: \"much\" is not a size":                                          "[[tenant]]\nuser = 1\nmaximum = \"much\"",
		"tenant 1: maximum: 0 is not possible; leave it out for none":              "[[tenant]]\nuser = 1\nmaximum = \"0\"",
		"tenant 1: maximum-pinned: 0 is not possible; leave it out for none":       "[[tenant]]\nuser = 1\nmaximum-pinned = \"0\"",
		"tenant 1: guaranteed: 0 is not possible; leave it out for none":           "[[tenant]]\nuser = 1\nguaranteed = \"0.1\"",
		"line 1": "tenant",
		"more is guaranteed to it than it may own": "[[tenant]]\nuser = 1\nmaximum = \"1M\"\nguaranteed = \"2M\"",
	} {
		_, err := parseTenants(text)
		require.ErrorContains(t, err, says)
	}
}

// TestTenantsOfAMount: users of unequal weights bring in turn more than fits. They end up with memory according to
// their weights, by Jain's index of the bytes that they hold. An error names the maximum that was exceeded.
func TestTenantsOfAMount(t *testing.T) {
	const alice, bob = 65534, 65533
	file := filepath.Join(t.TempDir(), "tenants.toml")
	write := func(text string) { require.NoError(t, os.WriteFile(file, []byte(text), 0o644)) }
	write(fmt.Sprintf("[[tenant]]\nuser = %d\nweight = 1\n[[tenant]]\nuser = %d\nweight = 3\n", alice, bob))
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=32M", "--allow-other", "--trust-users",
		"--tenants="+file)
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	warm := func(uid uint32, name string) result {
		path := filepath.Join(s.mountpoint, name)
		require.NoError(t, os.WriteFile(path, make([]byte, mib), 0o644))
		return execute(t, asUser(t, uid, command(t, "warm", path)))
	}
	held := func() map[string]float64 {
		var now statusDocument
		require.NoError(t, json.Unmarshal([]byte(gaiafsCommand(t, "status", "--json", s.mountpoint).out), &now))
		bytes := make(map[string]float64)
		for _, a := range now.Devices[0].Tenants {
			bytes[string(a.Tenant)] = float64(a.Owned)
		}
		return bytes
	}
	for i := range 20 {
		require.Equal(t, exitOK, warm(alice, fmt.Sprint("a", i)).code)
		require.Equal(t, exitOK, warm(bob, fmt.Sprint("b", i)).code)
	}
	bytes := held()
	x, y := bytes[fmt.Sprint("user ", alice)], bytes[fmt.Sprint("user ", bob)]/3
	require.GreaterOrEqual(t, (x+y)*(x+y)/(2*(x*x+y*y)), 0.95, "%v", bytes)

	write(fmt.Sprintf("[[tenant]]\nuser = %d\nmaximum = \"4M\"\n", alice))
	r := gaiafsCommand(t, "set", s.mountpoint, "tenants="+file)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, warm(alice, "a21").code, "her own files make room")
	require.LessOrEqual(t, held()[fmt.Sprint("user ", alice)], 4.0*mib)
	path := filepath.Join(s.mountpoint, "large")
	require.NoError(t, os.WriteFile(path, make([]byte, 6*mib), 0o644))
	r = execute(t, asUser(t, alice, command(t, "warm", path)))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, fmt.Sprintf("no more than 4.0 MiB (the maximum of tenant user %d)", alice))

	// Files below a directory count for its tenant, whoever maps them.
	write("[[tenant]]\ndirectory = \"sets\"\nmaximum = \"4M\"\n")
	require.Equal(t, exitOK, gaiafsCommand(t, "set", s.mountpoint, "tenants="+file).code)
	require.NoError(t, os.Mkdir(filepath.Join(s.mountpoint, "sets"), 0o755))
	for i := range 4 {
		require.Equal(t, exitOK, warm(bob, fmt.Sprint("sets/", i)).code)
	}
	require.Equal(t, 4.0*mib, held()["directory sets"])
	require.NoError(t, os.Rename(path, filepath.Join(s.mountpoint, "sets", "large")))
	r = execute(t, asUser(t, bob, command(t, "warm", filepath.Join(s.mountpoint, "sets", "large"))))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "(the maximum of tenant directory sets)")
	large := filepath.Join(s.mountpoint, "sets", "large")
	for _, before := range []string{"", "none"} {
		if before != "" {
			require.NoError(t, unix.Setxattr(large, pinAttribute, []byte(before), 0))
		}
		r = gaiafsCommand(t, "pin", large)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, "(the maximum of tenant directory sets)")
		require.Contains(t, r.err, ": nothing was pinned")
		require.Equal(t, before, attribute(t, large, pinAttribute), "the pin is as before")
	}
	write("[[tenant]]\nuser = 0\nguaranteed = \"64M\"\n")
	r = gaiafsCommand(t, "set", s.mountpoint, "tenants="+file)
	require.Contains(t, r.err, "more is guaranteed to tenants than")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
