package main

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/cuda"
)

func TestDoctor(t *testing.T) {
	r := gaiafsCommand(t, "doctor", "--json", "--dir", t.TempDir())
	var all []check
	require.NoError(t, json.Unmarshal([]byte(r.out), &all), r.out)
	names := make(map[string]string)
	for _, c := range all {
		names[c.Name] = c.Text
		require.Contains(t, []string{checkOK, checkWarn, checkFail}, c.State)
		if c.State == checkFail {
			require.NotEmpty(t, c.Cure, c.Name)
		}
	}
	for _, name := range []string{"kernel", "fuse", "limits", "memory", "driver", "disk", "mounts"} {
		require.Contains(t, names, name)
	}
	require.Regexp(t, "reads .*/s, writes .*/s", names["disk"])
	require.Equal(t, verdict(all) != nil, r.code == exitFailure)
	require.Contains(t, gaiafsCommand(t, "doctor", "--dir=/does/not/exist").out, "was not measured: no such file")
}

// An ended daemon is a failure, and doctor says how to clean up.
func TestDoctorFindsDeadMounts(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	require.NoError(t, s.cmd.Process.Kill())
	_, err := s.cmd.Process.Wait()
	require.NoError(t, err)
	require.Contains(t, checkMounts(), check{"mounts", checkFail, s.mountpoint + ": its daemon has ended",
		"'gaiafs mount " + s.source + " " + s.mountpoint + "' mounts again; 'gaiafs umount " + s.mountpoint +
			"' only removes the mount"})
	gaiafsCommand(t, "umount", s.mountpoint)
	require.False(t, s.isMounted(t))
}

func TestKernelCheck(t *testing.T) {
	for release, state := range map[string]string{"6.18.5": checkOK, "5.15.0-91-generic": checkOK, "5.4.0": checkWarn,
		"4.19": checkWarn, "x": checkWarn} {
		require.Equal(t, state, kernelCheck(release).State, release)
	}
}

// doctor measures links of emulated devices, and reports a GPU that cannot be used.
func TestDoctorOfGPUs(t *testing.T) {
	devices, err := openEmulated([]numbered{{0, -1}, {1, -1}}, measuredMemory)
	require.NoError(t, err)
	defer func() { require.NoError(t, closeDevices(devices)) }()
	var names []string
	for _, c := range checkLinks(devices) {
		require.Equal(t, checkOK, c.State, c.Text)
		require.Regexp(t, "[KMG]iB/s", c.Text)
		names = append(names, c.Name)
	}
	require.Equal(t, []string{"gpu0", "gpu1", "gpu1→0", "gpu0→1"}, names)

	probe := probeCUDA
	defer func() { probeCUDA = probe }()
	probeCUDA = func() ([]cuda.Found, error) {
		return []cuda.Found{{Name: "Old GPU", Unusable: errors.New("compute capability 3.5 is too old")}}, nil
	}
	all := checkGPUs()
	require.Len(t, all, 2)
	require.Equal(t, checkWarn, all[1].State)
	require.Contains(t, all[1].Text, "too old")
	probeCUDA = func() ([]cuda.Found, error) { return nil, cuda.ErrUnavailable }
	require.Equal(t, checkWarn, checkGPUs()[0].State)
}

// doctor says what helps if a daemon does not answer, and names each kind of failed check once.
func TestDoctorOnSilentDaemons(t *testing.T) {
	require.Equal(t, "end its process, or run 'gaiafs umount --force /mnt/a'", silentCheck(row{Mountpoint: "/mnt/a", what: noAnswer}).Cure)
	known := silentCheck(row{Mountpoint: "/mnt/a", PID: 7, what: "process 7 is stopped"})
	require.Equal(t, check{"mounts", checkFail, "/mnt/a: its daemon does not answer", "process 7 is stopped"}, known)
	require.EqualError(t, verdict([]check{known, known, {"fuse", checkFail, "", ""}}),
		"gaiafs cannot work as it should here: see mounts, fuse")
}
