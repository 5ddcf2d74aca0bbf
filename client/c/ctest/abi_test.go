package ctest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
)

// abi is the contract with programs that are linked with libgaiafs.so.0: each symbol with the version that added it.
// Lines may be added but must not change.
var abi = []string{
	"gaia_async_error@@GAIAFS_0.1", "gaia_error@@GAIAFS_0.1", "gaia_info@@GAIAFS_0.1", "gaia_macquire@@GAIAFS_0.1",
	"gaia_macquire_async@@GAIAFS_0.1", "gaia_madvise@@GAIAFS_0.1", "gaia_map@@GAIAFS_0.1", "gaia_mmap@@GAIAFS_0.1",
	"gaia_mrelease@@GAIAFS_0.1", "gaia_mrelease_async@@GAIAFS_0.1", "gaia_msync@@GAIAFS_0.1", "gaia_munmap@@GAIAFS_0.1",
	"gaia_version@@GAIAFS_0.1",
	"gaia_cancel@@GAIAFS_0.1.1", "gaia_context@@GAIAFS_0.1.1", "gaia_copies@@GAIAFS_0.1.1", "gaia_drop@@GAIAFS_0.1.1",
	"gaia_lend_context@@GAIAFS_0.1.1", "gaia_read@@GAIAFS_0.1.1", "gaia_start@@GAIAFS_0.1.1",
	"gaia_status@@GAIAFS_0.1.1",
	"gaia_wait@@GAIAFS_0.1.1", "gaia_write@@GAIAFS_0.1.1",
	"gaia_acquire_all@@GAIAFS_0.1.1", "gaia_group_abort@@GAIAFS_0.1.1", "gaia_group_begin@@GAIAFS_0.1.1",
	"gaia_group_release@@GAIAFS_0.1.1",
	"gaia_done@@GAIAFS_0.1.1", "gaia_use@@GAIAFS_0.1.1", "gaia_use_for@@GAIAFS_0.1.1",
	"gaia_done_use@@GAIAFS_0.1.1", "gaia_explain_faults@@GAIAFS_0.1.1", "gaia_start_use@@GAIAFS_0.1.1",
	"gaia_map_view@@GAIAFS_0.1.1", "gaia_mview@@GAIAFS_0.1.1", "gaia_view_layout@@GAIAFS_0.1.1", "gaia_note@@GAIAFS_0.1.1",
}

// requireABI checks that a libgaiafs.so defines exactly those symbols and stays loaded.
func requireABI(t *testing.T, library string) {
	t.Helper()
	var symbols []string
	for _, s := range strings.Fields(run(t, "nm", "-D", "--defined-only", "--with-symbol-versions",
		"--format=just-symbols", library)) {
		if !strings.HasPrefix(s, "GAIAFS_") { // the versions themselves
			symbols = append(symbols, s)
		}
	}
	require.ElementsMatch(t, abi, symbols)
	dynamic := run(t, "readelf", "-d", library)
	require.Contains(t, dynamic, "Library soname: [libgaiafs.so.0]")
	require.Contains(t, dynamic, "NODELETE")   // its threads would outlive it
	require.NotContains(t, dynamic, "libcuda") // it is loaded on demand
}

// TestHeaderAndBuildAgree compares the version that programs see with the one that is installed.
func TestHeaderAndBuildAgree(t *testing.T) {
	header, err := os.ReadFile("../gaiafs.h")
	require.NoError(t, err)
	version, err := os.ReadFile("../../../VERSION")
	require.NoError(t, err)
	require.Equal(t, "0.1.1\n", string(version))
	require.Regexp(t, `(?m)^#define GAIA_VERSION 101$`, string(header))
	// Each function in the header must be in a manual page.
	var pages []byte
	for _, name := range []string{"../gaia_mmap.3", "../gaia_mview.3", "../gaia_group_begin.3", "../gaia_use.3"} {
		page, err := os.ReadFile(name)
		require.NoError(t, err)
		pages = append(pages, page...)
	}
	for _, f := range regexp.MustCompile(`(?m)^GAIA_API [^(]*?(gaia_[a-z_]+)\(`).FindAllStringSubmatch(string(header),
		-1) {
		require.Contains(t, string(pages), f[1])
		require.Contains(t, strings.Join(abi, " "), f[1]+"@@")
	}
}

func TestGrowingArguments(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "abi", build)
			d := startDaemon(t, &controltest.Cache{})
			d.run(client, "args", d.file())
			d.waitMapped(0)
		})
	}
}

func TestPeers(t *testing.T) {
	d := startGPUs(t, fakecuda.Dir(t), "FAKECUDA_DEVICES=3")
	d.run(compile(t, "abi", "address"), "peers", d.file())
	d.waitMapped(0)
	d.env = append(d.env, "FAKECUDA_FAIL=cuDeviceCanAccessPeer:2")
	out, err := d.command(compile(t, "abi", "plain"), "peers", d.file()).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "cuDeviceCanAccessPeer failed")
}

// TestOldProgram runs a program that was linked with a library whose symbols had no versions.
func TestOldProgram(t *testing.T) {
	_, build := installed(t, "")
	dir := t.TempDir()
	source, old := filepath.Join(dir, "old.c"), filepath.Join(dir, "libgaiafs.so.0")
	require.NoError(t, os.WriteFile(source, []byte("char *gaia_error(void) { return \"old\"; }\n"), 0o600))
	run(t, "cc", "-shared", "-fPIC", "-Wl,-soname,libgaiafs.so.0", "-o", old, source)
	program := filepath.Join(dir, "program")
	require.NoError(t, os.WriteFile(program+".c",
		[]byte("char *gaia_error(void);\nint main(void) { return gaia_error()[0]; }\n"), 0o600))
	run(t, "cc", "-o", program, program+".c", old)
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+build)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Empty(t, string(out))
}
