// Package python runs the tests of the Python package with go test, on mounts of emulated devices and of devices
// disguised as GPUs.
package python

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testmount"
	"github.com/gaiafs/gaiafs/pagecache"
)

func TestMain(m *testing.M) {
	testmount.Main()
	dir, err := os.MkdirTemp("", "python")
	if err != nil {
		panic(err)
	}
	library.dir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

var library struct {
	dir   string
	build sync.Once
	out   []byte
	err   error
}

// libgaiafs returns the path of the C library, built from the current source.
func libgaiafs(t *testing.T) string {
	t.Helper()
	library.build.Do(func() {
		library.out, library.err = exec.Command("make", "-C", "../c", "GAIAFS_BUILD="+library.dir).CombinedOutput()
	})
	require.NoError(t, library.err, "%s", library.out)
	return filepath.Join(library.dir, "libgaiafs.so.0")
}

// interpreter returns the Python of the virtual environment that .ci/setup makes.
func interpreter(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../build/python/bin/python")
	require.NoError(t, err)
	if _, err := os.Stat(path); err != nil {
		if _, err := os.Stat("../../build/python/unreachable"); err == nil {
			t.Skip("PyPI could not be reached when .ci/setup test made build/python")
		}
		if os.Getenv("GAIAFS_REQUIRE_TOOLS") != "" {
			t.Fatal("build/python is missing: make it with .ci/setup test")
		}
		t.Skip("build/python is missing: make it with .ci/setup test")
	}
	return path
}

// pytest runs the tests in files, or all, with the package of this folder.
func pytest(t *testing.T, python string, env []string, files ...string) {
	t.Helper()
	cmd := exec.Command(python, append([]string{"-m", "pytest", "-q", "-p", "no:cacheprovider"}, files...)...)
	cmd.Env = append(append(os.Environ(), "PYTHONPATH="+must(filepath.Abs(".")), "PYTHONDONTWRITEBYTECODE=1",
		"GAIAFS_LIBRARY="+libgaiafs(t), "FAKECUDA_LEAKS=1", "OPENBLAS_NUM_THREADS=1"), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("%s", out)
}

func must(path string, err error) string {
	if err != nil {
		panic(err)
	}
	return path
}

func TestPackage(t *testing.T) {
	python := interpreter(t)
	for _, kind := range []string{"emulated", "cuda"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			env := []string{"GAIAFS_TEST_KIND=" + kind}
			if kind == "cuda" {
				env = append(env, "LD_LIBRARY_PATH="+fakecuda.Dir(t))
			}
			m := testmount.Start(t, testmount.Options{
				Devices: 2, Memory: 64 << 20, Poison: true, Disguised: kind == "cuda",
				WriteBackInterval: 20 * time.Millisecond,
			})
			pytest(t, python, append(env, "GAIAFS_TEST_MOUNT="+m.Dir, "GAIAFS_TEST_SOURCE="+m.Source))
		})
	}
}

// TestIntegrations runs the loaders of vLLM and SGLang with fakes of the engines.
func TestIntegrations(t *testing.T) {
	python := interpreter(t)
	m := testmount.Start(t, testmount.Options{Devices: 1, Memory: 64 << 20, Poison: true})
	path := must(filepath.Abs(".")) + ":" + must(filepath.Abs("integrations"))
	pytest(t, python, []string{"PYTHONPATH=" + path, "GAIAFS_TEST_MOUNT=" + m.Dir},
		"integrations/tests/test_loaders.py")
}

// TestTransformers runs models with each version of transformers that make test-transformers installed.
func TestTransformers(t *testing.T) {
	versions, err := filepath.Glob("../../build/transformers/[0-9]*")
	require.NoError(t, err)
	if len(versions) == 0 {
		t.Skip("PyTorch and transformers are missing: make test-transformers gets them")
	}
	python := must(filepath.Abs("../../build/transformers/python/bin/python"))
	for _, version := range versions {
		t.Run(filepath.Base(version), func(t *testing.T) {
			path := must(filepath.Abs(".")) + ":" + must(filepath.Abs(version))
			cmd := exec.Command(python, "-c", "import torch, transformers, sys; sys.exit(transformers.__version__)")
			cmd.Env = append(os.Environ(), "PYTHONPATH="+path)
			out, _ := cmd.CombinedOutput()
			require.Equal(t, filepath.Base(version)+"\n", string(out))
			m := testmount.Start(t, testmount.Options{Devices: 2, Memory: 64 << 20, Poison: true})
			pytest(t, python, []string{"PYTHONPATH=" + path, "GAIAFS_TEST_KIND=emulated", "HF_HUB_OFFLINE=1",
				"GAIAFS_TEST_MOUNT=" + m.Dir, "GAIAFS_TEST_SOURCE=" + m.Source},
				"tests/test_transformers.py", "tests/test_patching.py")
		})
	}
}

// TestBrackets runs programs with movable memory on a mount whose devices have four extents.
func TestBrackets(t *testing.T) {
	python := interpreter(t)
	const budget = 8 << 20
	for _, kind := range []string{"emulated", "cuda"} {
		t.Run(kind, func(t *testing.T) {
			env := []string{"GAIAFS_TEST_KIND=" + kind, fmt.Sprint("GAIAFS_TEST_BUDGET=", budget)}
			if kind == "cuda" {
				env = append(env, "LD_LIBRARY_PATH="+fakecuda.Dir(t))
			}
			m := testmount.Start(t, testmount.Options{Memory: budget, PinnedMemory: 2 << 20, Poison: true,
				Disguised: kind == "cuda"})
			pytest(t, python, append(env, "GAIAFS_TEST_MOUNT="+m.Dir, "GAIAFS_TEST_SOURCE="+m.Source),
				"tests/test_brackets.py")
		})
	}
}

// TestTenant runs a program with a tenant's name.
func TestTenant(t *testing.T) {
	python := interpreter(t)
	const name = "training"
	m := testmount.Start(t, testmount.Options{Memory: 8 << 20, Tenants: []pagecache.Tenant{
		{ID: pagecache.NamedTenant(name), Weight: 1, Users: []uint32{uint32(os.Geteuid())}},
	}})
	pytest(t, python, []string{"GAIAFS_TEST_TENANT=" + name, "GAIAFS_TEST_MOUNT=" + m.Dir}, "tests/test_tenant.py")
}

// TestSource checks the package with mypy and ruff.
func TestSource(t *testing.T) {
	for name, tool := range map[string][]string{
		"mypy":  {"mypy", "--cache-dir", "../../build/mypy"},
		"paths": {"mypy", "--cache-dir", "../../build/mypy", "tests/typed_paths.py"},
		"ruff":  {"ruff", "check", "--no-cache", "--quiet"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.Command(interpreter(t), append([]string{"-m"}, tool...)...).CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}

// TestWheel makes a wheel from the folder, without the network. The wheel has the C library, needs no glibc newer than
// 2.34, and works without the folder.
func TestWheel(t *testing.T) {
	python := interpreter(t)
	dir := t.TempDir()
	for _, part := range []string{"c", "python"} { // building leaves files behind
		require.NoError(t, os.CopyFS(filepath.Join(dir, "client", part), os.DirFS(filepath.Join("..", part))))
	}
	pip := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(python, append([]string{"-m", "pip", "-q", "--disable-pip-version-check"}, args...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}
	pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", dir, filepath.Join(dir, "client", "python"))
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	require.NoError(t, err)
	require.Len(t, wheels, 1)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "client")))
	site := filepath.Join(dir, "site")
	pip("install", "--no-index", "--no-deps", "--root-user-action=ignore", "--target", site, wheels[0])

	f, err := elf.Open(filepath.Join(site, "gaiafs", "libgaiafs.so.0"))
	require.NoError(t, err)
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	require.NoError(t, err)
	newest := 0
	for _, s := range symbols {
		var minor int
		if n, _ := fmt.Sscanf(s.Version, "GLIBC_2.%d", &minor); n == 1 {
			newest = max(newest, minor)
		}
	}
	require.LessOrEqual(t, newest, 34)
	require.Regexp(t, fmt.Sprintf(`gaiafs-[0-9.]+-py3-none-manylinux_2_%d_`, newest), wheels[0])

	cmd := exec.Command(python, "-c", "import gaiafs._core as c; print(c._library._name)")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PYTHONPATH="+site)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, filepath.Join(site, "gaiafs", "libgaiafs.so.0")+"\n", string(out))
	require.FileExists(t, filepath.Join(site, "gaiafs", "py.typed"))
}

// program returns the first Python program of a page.
func program(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), "```python\n")
	require.True(t, ok)
	program, _, ok := strings.Cut(rest, "```")
	require.True(t, ok)
	return program
}

// TestReadme runs the program in README.md. cmd/gaiafs runs those of the top README with its commands.
func TestReadme(t *testing.T) {
	python := interpreter(t)
	m := testmount.Start(t, testmount.Options{})
	run := func(program string, arguments ...string) {
		t.Helper()
		cmd := exec.Command(python, append([]string{"-W", "error", "-c", program}, arguments...)...)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+must(filepath.Abs(".")), "PYTHONDONTWRITEBYTECODE=1",
			"GAIAFS_LIBRARY="+libgaiafs(t))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	// The program uses PyTorch, which is too large for the tests; NumPy's arrays do the same.
	run("import sys, safetensors.numpy as s, numpy as n; s.save_file({'w': n.ones(3)}, sys.argv[1])",
		m.Path("model.safetensors"))
	run(strings.NewReplacer("/mnt/data", m.Dir, "m.tensor", "m.numpy").Replace(program(t, "README.md")))
	got, err := os.ReadFile(m.Path("out.bin"))
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat([]byte{0, 0, 0x80, 0x3f}, 1<<20), got) // 1.0
}

// TestDaemonStopped stops the daemon while a program uses its mount. Ctrl-C must still end the program.
func TestDaemonStopped(t *testing.T) {
	testDaemon(t, "tests/test_core.py", "tests/test_silence.py")
}

// testDaemon runs tests that do something to the daemon of a mount.
func testDaemon(t *testing.T, files ...string) *testmount.Mount {
	t.Helper()
	python := interpreter(t)
	m := testmount.Start(t, testmount.Options{Devices: 1})
	pytest(t, python, []string{
		"GAIAFS_TEST_KIND=emulated", "GAIAFS_TEST_MOUNT=" + m.Dir, "GAIAFS_TEST_SOURCE=" + m.Source,
		fmt.Sprint("GAIAFS_TEST_DAEMON=", m.Process.Pid),
	}, files...)
	return m
}

// TestDaemonGone kills the daemon while a program uses its mount.
func TestDaemonGone(t *testing.T) {
	testDaemon(t, "tests/test_daemon_gone.py").Wait(10 * time.Second)
}
