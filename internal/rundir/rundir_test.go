package rundir

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const child = "GAIAFS_RUNDIR_TEST_PARENT"

func TestMain(m *testing.M) {
	if parent := os.Getenv(child); parent != "" {
		d, err := Make(parent, "run-")
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString(d.Path + "\n")
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func left(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestOnlyDirectoriesOfEndedRunsAreSwept(t *testing.T) {
	parent, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	mine, err := Make(parent, "run-")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(mine.Path, "file"), nil, 0o600))
	kept, err := Make(parent, "run-")
	require.NoError(t, err)
	require.NoError(t, kept.Keep())
	require.NoError(t, os.Mkdir(filepath.Join(parent, "run-1"), 0o700))
	outside := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(outside, marker), nil, 0o600))
	require.NoError(t, os.Symlink(outside, filepath.Join(parent, "run-2")))
	require.NoError(t, os.Mkdir(filepath.Join(parent, "run-word"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(parent, "run-word", marker), nil, 0o600))
	before := left(t, parent)
	if os.Geteuid() == 0 {
		other := filepath.Join(parent, "run-3")
		require.NoError(t, os.Mkdir(other, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(other, marker), nil, 0o600))
		require.NoError(t, os.Chown(other, 4711, 4711))
		before = left(t, parent)
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), child+"="+parent)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line := make([]byte, 4096)
	n, err := out.Read(line)
	require.NoError(t, err)
	theirs := string(line[:n-1])
	require.NoError(t, os.MkdirAll(filepath.Join(theirs, "a", "b"), 0o755))
	require.Empty(t, Sweep(parent, "run-"), "it runs")
	require.DirExists(t, theirs)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Equal(t, []string{theirs}, Sweep(parent, "run-"))
	require.Equal(t, before, left(t, parent))
	require.FileExists(t, filepath.Join(outside, marker))
	require.NoError(t, mine.Remove())
	require.NoDirExists(t, mine.Path)
}

// TestMountsInADirectoryKeepIt: files are not removed through a mount that stays.
func TestMountsInADirectoryKeepIt(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount")
	}
	parent, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	d, err := Make(parent, "run-")
	require.NoError(t, err)
	require.NoError(t, d.lock.Close()) // as if the run had ended
	precious, at := t.TempDir(), filepath.Join(d.Path, "with space")
	require.NoError(t, os.WriteFile(filepath.Join(precious, "file"), nil, 0o600))
	require.NoError(t, os.Mkdir(at, 0o755))
	require.NoError(t, unix.Mount(precious, at, "", unix.MS_BIND, ""))
	swept := Sweep(parent, "run-")
	require.NoError(t, unix.Unmount(at, 0))
	require.Empty(t, swept)
	require.FileExists(t, filepath.Join(precious, "file"))
	require.Equal(t, []string{d.Path}, Sweep(parent, "run-"))
}
