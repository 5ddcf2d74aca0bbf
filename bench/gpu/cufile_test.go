package main

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// cuFileOnFake reads a file with the fake libcufile, in a process with that environment. It reports whether this is
// that process, and returns the result.
func cuFileOnFake(t *testing.T, fake string) (here bool, a answer, err error) {
	folder := t.TempDir()
	const variable = "CUFILE_ENV_PATH_JSON"
	if !withFake(t, variable+"="+filepath.Join(folder, "cufile.json"), "FAKECUFILE="+fake) {
		return false, a, nil
	}
	folder = filepath.Dir(os.Getenv(variable))
	environment, err := configureCuFile(folder)
	require.NoError(t, err)
	require.Contains(t, environment, variable+"="+os.Getenv(variable))
	kernelModules = "/dev/null"
	path := filepath.Join(t.TempDir(), "file")
	const size = 3<<20 + 5*pageSize
	p := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(p)
	require.NoError(t, os.WriteFile(path, p, 0o600))
	w := &workerState{}
	_, err = w.carryOut(order{Do: "open", GPUs: "cuda:0"})
	require.NoError(t, err)
	o := order{Do: "cufile", Path: path, Size: size, Pieces: []int{0}, Log: folder}
	if a, err = w.carryOut(o); err != nil {
		return true, a, err
	}
	again, err := w.carryOut(o)
	require.NoError(t, err)
	require.Equal(t, a.Sums, again.Sums)
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	at, err := w.gpu.alloc(size)
	require.NoError(t, err)
	require.NoError(t, w.gpu.copyIn(at, p))
	sums, err := w.sums(at, size, []int{0})
	require.NoError(t, err)
	require.Equal(t, sums, a.Sums)
	return true, a, nil
}

func TestCuFileReads(t *testing.T) {
	here, a, err := cuFileOnFake(t, "")
	require.NoError(t, err)
	if here {
		require.Positive(t, a.Took)
		require.Empty(t, a.Note)
	}
}

func TestCuFileThatWantsODirect(t *testing.T) {
	here, a, err := cuFileOnFake(t, "direct")
	require.NoError(t, err)
	if here {
		require.Contains(t, a.Note, "reads the disk")
	}
}

func TestCuFileThatTakesNoFile(t *testing.T) {
	here, _, err := cuFileOnFake(t, "all")
	if here {
		require.ErrorContains(t, err, "cuFileHandleRegister: the file is not registered (cuFile error 5027)\n"+
			"with O_DIRECT cuFileHandleRegister: ")
		require.ErrorContains(t, err, "; cuFile's log says: ERROR cufio-udev:67 udev property not found: ID_FS_USAGE vda")
	}
}

func TestCuFileWithoutModules(t *testing.T) {
	if !withFake(t) {
		return
	}
	kernelModules = filepath.Join(t.TempDir(), "none")
	g, err := openCUDA(0)
	require.NoError(t, err)
	_, err = openCuFile(g, t.TempDir())
	require.ErrorIs(t, err, errMissing)
	require.ErrorContains(t, err, "a kernel with modules")
	_, err = openCuFile(hostGPU(0), t.TempDir())
	require.ErrorIs(t, err, errMissing)
}

func TestLastOfLog(t *testing.T) {
	folder := t.TempDir()
	require.Empty(t, lastOfLog(folder))
	write := func(text string) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, "cufile_7.log"), []byte(text), 0o600))
	}
	write("")
	require.Empty(t, lastOfLog(folder))
	write("1 [pid=1] INFO   a\n\n2 [pid=1] INFO   b\n3 [pid=1] INFO   c\n4 [pid=1] INFO  d\n5 [pid=1] INFO   e")
	require.Equal(t, "INFO a | INFO b | INFO c | INFO d | INFO e", lastOfLog(folder))
	write("1 [pid=1] ERROR  a\n2 [pid=1] ERROR  a\n3 [pid=1] INFO   b\n")
	require.Equal(t, "ERROR a", lastOfLog(folder))
}

func TestUdevRecords(t *testing.T) {
	_, _, err := udevRecord("/nonexistent")
	require.Error(t, err)
	name, _, err := udevRecord("/proc/self/stat")
	require.NoError(t, err)
	require.Empty(t, name, "it is on no disk")

	outside, err := mountNamespace()
	require.NoError(t, err)
	require.ErrorContains(t, showRecord(outside, t.TempDir(), "b9:9", "E:X=1\n"), "no mount namespace of its own")
	c, err := startWorkerIn(t.Context(), &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}, "emulated:1", 0)
	if errors.Is(err, syscall.EPERM) {
		t.Skip("this user may have no mount namespace")
	}
	require.NoError(t, err)
	defer c.end()
	before, err := os.ReadDir("/run")
	require.NoError(t, err)
	kept := filepath.Join(t.TempDir(), "run")
	_, err = c.do(order{Do: "udev", Outside: outside, Kept: kept, Name: "b9:9", Text: "E:X=1\n"})
	require.NoError(t, err)
	root := filepath.Join("/proc", strconv.Itoa(c.cmd.Process.Pid), "root")
	text, err := os.ReadFile(filepath.Join(root, "run", udevRecords, "b9:9"))
	require.NoError(t, err)
	require.Equal(t, "E:X=1\n", string(text))
	require.ErrorIs(t, unix.Access(filepath.Join("/run", udevRecords, "b9:9"), unix.F_OK), unix.ENOENT,
		"nobody else sees it")
	for _, e := range before {
		if e.Name() == "udev" {
			continue
		}
		to, err := os.Readlink(filepath.Join(root, "run", e.Name()))
		require.NoError(t, err)
		require.NoError(t, unix.Access(filepath.Join(root, to), unix.F_OK), "%s is still there", e.Name())
	}
	entries, err := os.ReadDir(kept)
	require.NoError(t, err)
	require.Empty(t, entries, "what is mounted there is mounted in the other namespace")

}
