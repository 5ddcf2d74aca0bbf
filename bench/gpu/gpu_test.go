package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func TestMain(m *testing.M) {
	workIfAsked()
	os.Exit(m.Run())
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"4096": 4096, "64k": 64 << 10, "512MiB": 512 << 20, "10GiB": 10 << 30,
		"10G": 10 << 30, "2TB": 2 << 40} {
		got, err := parseSize(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, bad := range []string{"", "0", "-1", "GiB", "1.5G", "10X", "99999999T", "1Gi0", "1 G"} {
		_, err := parseSize(bad)
		require.Error(t, err, bad)
	}
	for n, want := range map[int64]string{4096: "4 KiB", 64 << 20: "64 MiB", 10 << 30: "10 GiB", 3 << 29: "1.5 GiB"} {
		require.Equal(t, want, sizeText(n))
	}
}

func TestDevices(t *testing.T) {
	for text, want := range map[string]deviceChoice{
		"cuda:0": {false, []int{0}}, "cuda:2,1": {false, []int{2, 1}}, "emulated:2": {true, []int{0, 1}},
	} {
		got, err := parseDevices(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got)
	}
	for _, bad := range []string{"", "cuda", "cuda:", "cuda:x", "cuda:0,", "cuda:-1", "emulated", "emulated:0",
		"auto"} {
		_, err := parseDevices(bad)
		require.Error(t, err, bad)
	}
}

func TestKernelsAreCompiledFromTheirSource(t *testing.T) {
	source, err := os.ReadFile("kernels.cu")
	require.NoError(t, err)
	first, _, _ := bytes.Cut(kernelsPTX, []byte("\n"))
	require.Contains(t, string(first), fmt.Sprintf("%x", sha256.Sum256(source)), "run make bench-ptx where nvcc is")
	for _, kernel := range []string{".entry bench_touch(", ".entry bench_stripes(", ".version 7.0", ".target sm_75"} {
		require.Contains(t, string(kernelsPTX), kernel)
	}
}

// Writers with separate stripes store every byte once, however the memory is divided.
func TestStripesOfAllWritersAreTheWhole(t *testing.T) {
	for _, c := range []struct{ size, width, writers, part int64 }{
		{4096, 1, 2, 4096}, {4096, 8, 2, 1000}, {10_000, 64, 3, 777}, {100, 4096, 2, 33}, {300_000, 100_000, 2, 4096},
	} {
		p := make([]byte, c.size)
		times := make([]int, c.size)
		for w := range c.writers {
			st := stripes{size: c.size, width: c.width, first: w, writers: c.writers, seed: 7}
			for at := int64(0); at < c.size; at += c.part {
				end := min(at+c.part, c.size)
				st.store(at, p[at:end])
				st.each(at, p[at:end], func(part []byte, at int64) {
					require.Equal(t, w, at/c.width%c.writers)
					for i := range part {
						times[at+int64(i)]++
					}
				})
			}
		}
		for i, n := range times {
			require.Equal(t, 1, n, "byte %d of %+v", i, c)
		}
		require.Zero(t, wrong(p, 0, 7))
		require.Equal(t, c.size, wrong(p, 0, 8), "another seed is another byte everywhere")
		p[c.size-1]++
		require.Equal(t, int64(1), wrong(p, 0, 7))
	}
}

func TestHostGPUDoesAsItSays(t *testing.T) {
	g := hostGPU(1)
	a, err := g.alloc(8192)
	require.NoError(t, err)
	b, err := g.alloc(8192)
	require.NoError(t, err)
	require.NoError(t, g.paint(a, stripes{size: 8192, width: 8, first: 1, writers: 2, seed: 3}, 2))
	require.NoError(t, g.touch(a, 4096, 2, 5))
	require.NoError(t, g.copyWithin(b, a, 8192))
	got := make([]byte, 8192)
	require.NoError(t, g.copyOut(got, b))
	want := make([]byte, 8192)
	stripes{size: 8192, width: 8, first: 1, writers: 2, seed: 3}.store(0, want)
	want[0] += 5
	want[4096] += 5
	require.Equal(t, want, got)
	require.NoError(t, g.copyIn(a, []byte("hello")))
	require.NoError(t, g.copyOut(got[:5], a))
	require.Equal(t, "hello", string(got[:5]))
	require.NoError(t, g.free(a))
	require.NoError(t, g.free(b))
	require.Error(t, g.free(b), "freed before")
}

func TestDataIsAFileOfSafetensors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	const size = pieceSize + 5<<20
	d, err := makeData(path, "data", size)
	require.NoError(t, err)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Len(t, text, size)
	require.Equal(t, [][sha256.Size]byte{sha256.Sum256(text[:pieceSize]), sha256.Sum256(text[pieceSize:])}, d.sums)
	n := binary.LittleEndian.Uint64(text)
	require.EqualValues(t, headerSize-8, n)
	var header map[string]struct {
		Type    string  `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	require.NoError(t, json.Unmarshal(text[8:8+n], &header))
	require.Len(t, header, 2)
	require.Equal(t, []int64{pieceSize, size - headerSize}, header["t00001"].Offsets, "the tensors leave nothing out")
	_, err = safetensorsHeader(1 << 50)
	require.ErrorContains(t, err, "more tensors")
	header500, err := safetensorsHeader(500 * pieceSize)
	require.NoError(t, err)
	require.Len(t, header500, headerSize)
}

func TestWrongBytesAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	const size = pieceSize + 4096 + headerSize
	d, err := makeData(path, "data", size)
	require.NoError(t, err)
	g := hostGPU(0)
	a, err := g.alloc(size)
	require.NoError(t, err)
	defer g.free(a)
	s := &session{gpus: []gpu{g}}
	for name, load := range map[string]loader{"pageable": s.loadPageable, "1 reader": s.loadPinned(1, 1),
		"8 readers": s.loadPinned(8, 2)} {
		clear(a.bytes(size))
		require.NoError(t, load(path, g, a, size), name)
		check, err := newChecker(g, 2)
		require.NoError(t, err)
		require.NoError(t, check.data(g, a, size, d), name)
		f, err := os.Open(path)
		require.NoError(t, err)
		require.NoError(t, check.same(g, a, f, 0, size))
		a.bytes(size)[size-1] ^= 1
		require.ErrorContains(t, check.data(g, a, size, d), "wrong bytes: piece 1")
		require.ErrorContains(t, check.same(g, a+pieceSize, f, pieceSize, size-pieceSize), "wrong bytes")
		require.NoError(t, check.data(g, a, pieceSize, d), "the first piece is as it was")
		f.Close()
		require.Error(t, load(path+"-not-there", g, a, size), name)
		require.Error(t, load(path, g, a, size+pieceSize), "the file is shorter")
	}
}

func TestDirectReadsReadAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(path, make([]byte, 3*directRead+8192), 0o600))
	_, err := readDirect(path, 3*directRead+8192)
	if errors.Is(err, os.ErrInvalid) || err != nil && strings.Contains(err.Error(), "O_DIRECT") {
		t.Skip("no O_DIRECT on the filesystem of temporary files")
	}
	require.NoError(t, err)
	_, err = readDirect(path, 4*directRead)
	require.ErrorContains(t, err, "short read of")
	require.NoError(t, warmUp(path, 3*directRead+8192))
}

func TestAnswersAreErrorsWhereTheyShouldBe(t *testing.T) {
	c, err := startWorker(t.Context(), "emulated:1", 0)
	require.NoError(t, err)
	defer c.end()
	_, err = c.do(order{Do: "dance"})
	require.ErrorContains(t, err, `cannot do "dance"`)
	_, err = c.do(order{Do: "map", Path: "/nonexistent", Size: 1})
	require.ErrorContains(t, err, "no such file")
	_, err = c.do(order{Do: "cufile", Path: "/nonexistent", Size: 1})
	require.ErrorIs(t, err, errMissing)
	_, err = startWorker(t.Context(), "nonsense", 0)
	require.ErrorContains(t, err, "nonsense")
	_, err = startSafetensors(t.Context(), "/nonexistent/python", 0)
	require.ErrorIs(t, err, errMissing)
}

func TestSafetensorsAnswers(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	if exec.Command(python, "-c", "import torch").Run() == nil {
		t.Skip("PyTorch is installed, and this asks what happens without")
	}
	_, err = startSafetensors(t.Context(), python, 0)
	require.ErrorIs(t, err, errMissing)
	require.ErrorContains(t, err, "torch")
}

// TestModulesOfTheCurrentFolder: modules in the current folder are not taken for PyTorch or safetensors.
func TestModulesOfTheCurrentFolder(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	t.Chdir(t.TempDir())
	for _, module := range []string{"torch.py", "safetensors.py", "json.py"} {
		require.NoError(t, os.WriteFile(module, []byte("raise RuntimeError('of this folder')\n"), 0o600))
	}
	c, err := startSafetensors(t.Context(), python, 0)
	if err == nil {
		c.end()
		return
	}
	require.ErrorIs(t, err, errMissing, "and no error of a module of this folder")
}

// TestChildrenEndWithTheRun: a child that does not answer ends with the context of the run.
func TestChildrenEndWithTheRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c, err := startChild(exec.CommandContext(ctx, "sleep", "1000"))
	require.NoError(t, err)
	defer c.end()
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	_, err = c.do(order{Do: "open"})
	require.ErrorContains(t, err, "sleep ended")
	require.Less(t, time.Since(began), childPatience/2)
}

func TestWrongUsage(t *testing.T) {
	var out bytes.Buffer
	for _, args := range [][]string{
		{"extra"}, {"--nonsense"}, {"--rows", "cold,hot"}, {"--size", "1K"}, {"--size", "x"}, {"--runs", "0"},
		{"--time", "0"},
		{"--gpus", "nonsense"}, {"--gpus", "emulated:1", "--dir", "/nonexistent"},
		{"--gpus", "emulated:1", "--gaiafs", "/nonexistent/gaiafs", "--dir", t.TempDir()},
	} {
		require.Error(t, run(args, &out, io.Discard), args)
	}
	require.NoError(t, run([]string{"--list"}, &out, io.Discard))
	require.Contains(t, out.String(), "sharing\n")
}

// program builds gaiafs, or returns the one named in the environment if there is no Go.
func program(t *testing.T) string {
	if path := os.Getenv("GAIAFS_BINARY"); path != "" {
		return path
	}
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs /dev/fuse, and root to mount without fusermount3")
	}
	path := filepath.Join(t.TempDir(), "gaiafs")
	out, err := exec.Command("go", "build", "-o", path, "github.com/gaiafs/gaiafs/cmd/gaiafs").CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}

func TestARunOnEmulatedDevices(t *testing.T) {
	binary, dir := program(t), t.TempDir()
	jsonFile, markdown := filepath.Join(t.TempDir(), "r.json"), filepath.Join(t.TempDir(), "r.md")
	var out bytes.Buffer
	err := run([]string{"--gpus", "emulated:2", "--gaiafs", binary, "--dir", dir, "--size", "4MiB", "--large", "8MiB",
		"--runs", "1",
		"--rows", "warm,shards,update,out,links,pinned,release,acquire,sharing,stitch,peer,second,reads", "--json", jsonFile,
		"--markdown", markdown}, &out, io.Discard)
	require.NoError(t, err, out.String())
	var r rows.Report
	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	groups := make(map[string]int)
	for _, row := range r.Rows {
		groups[row.Group]++
		require.Empty(t, row.Skipped, row.Name)
		if row.Name == "lost updates" || strings.HasPrefix(row.Name, "torn versions") ||
			strings.HasPrefix(row.Name, "memory of the GPU") {
			require.Equal(t, rows.Met, row.Targets[0].Verdict, row.Name)
		}
	}
	require.Equal(t, map[string]int{"warm": 1, "shards": 2, "update": 3, "out": 3, "links": 1, "pinned": 2, "release": 4,
		"acquire": 4, "sharing": 2*(3*2+4*3+2) + 1, "stitch": 4, "peer": 3, "second": 2 + 4 + 1, "reads": 6 * 3},
		groups)
	text, err = os.ReadFile(markdown)
	require.NoError(t, err)
	require.Contains(t, string(text), "- emulated device 1\n")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "nothing is left behind")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), dir)
}

// The measured files fit on any GPU, together with the other sides.
func TestSizesFitTheGPU(t *testing.T) {
	const g = int64(1 << 30)
	for _, free := range []int64{g, 4 * g, 7*g + 12345, 12 * g, 24 * g, 80 * g, 140 * g} {
		for _, budget := range []int64{free / 4 * 3, free / 2} {
			for _, want := range []int64{4 << 20, g, 10 * g, 100 * g} {
				size, call, err := fitting(want, free, budget)
				require.NoError(t, err)
				require.LessOrEqual(t, size, want)
				require.LessOrEqual(t, size, budget)
				require.Less(t, 2*size, free)
				require.LessOrEqual(t, call, min(size, callSize))
				require.LessOrEqual(t, budget+3*call, free)
			}
		}
	}
	size, call, err := fitting(10*g, 140*g, 105*g)
	require.NoError(t, err)
	require.Equal(t, []int64{10 * g, g}, []int64{size, call})
	_, _, err = fitting(10*g, 1<<20, 0)
	require.ErrorContains(t, err, "end other programs on it, or choose another one with --gpus")
}

func TestOneDeviceSkipsRowsForTwo(t *testing.T) {
	var out bytes.Buffer
	err := run([]string{"--gpus", "emulated:1", "--gaiafs", program(t), "--dir", t.TempDir(), "--size", "4MiB",
		"--runs", "1",
		"--rows", "stitch,peer"}, &out, io.Discard)
	require.NoError(t, err)
	require.Contains(t, out.String(), "stitch/stitching on two GPUs: skipped: there is one")
	require.Contains(t, out.String(), "peer/pages from the other GPU: skipped: there is one")
}

// bundle makes what run.sh needs for the benchmarks, with a shell script instead of the program.
func bundle(t *testing.T, script string) (dir string) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("needs bash")
	}
	dir = t.TempDir()
	text, err := os.ReadFile("run.sh")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "run.sh"), text, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gpu-bench"), []byte("#!/bin/bash\n"+script), 0o755))
	return dir
}

func TestRunScript(t *testing.T) {
	type step struct{ Step, Result, Words, Log string }
	for name, c := range map[string]struct {
		script, result, words string
		status                int
		bench                 any
	}{
		"passes": {`while [ $# -gt 0 ]; do [ "$1" != --json ] || echo '{"rows": 7}' >"$2"; shift; done; printf '[warm]\na table\nthe last line\n'`,
			"passed", "the last line", 0, map[string]any{"rows": 7.0}},
		"fails": {`echo 'it says "no"'; exit 3`, "failed", "failed: status 3; it says 'no'", 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir, out, work := bundle(t, c.script), filepath.Join(t.TempDir(), "out"), t.TempDir()
			cmd := exec.Command(filepath.Join(dir, "run.sh"), "--gpus", "emulated:2", "--bench", "--quick", "--size",
				"64MiB", "--out", out, "--dir", work)
			said, err := cmd.CombinedOutput()
			require.Equal(t, c.status, cmd.ProcessState.ExitCode(), "%v %s", err, said)
			text, err := os.ReadFile(filepath.Join(out, "results.json"))
			require.NoError(t, err)
			var results struct {
				GPUs  string
				Quick bool
				Steps []step
				Bench any
			}
			require.NoError(t, json.Unmarshal(text, &results), string(text))
			require.Equal(t, []step{{"bench", c.result, c.words, "bench.log"}}, results.Steps)
			require.Equal(t, c.bench, results.Bench)
			require.Equal(t, "emulated:2", results.GPUs)
			if c.status == 0 {
				require.Contains(t, string(said), "\na table\n")
			}
			left, err := os.ReadDir(work)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// run.sh explains a folder without free space, and a program that was killed.
func TestRunScriptTellsWhatItHas(t *testing.T) {
	dir, out, work := bundle(t, `echo "warm/a row: 1.00"; echo noise; kill -9 $$`), filepath.Join(t.TempDir(), "out"),
		t.TempDir()
	run := func(size string) (status int, said string) {
		cmd := exec.Command(filepath.Join(dir, "run.sh"), "--gpus", "emulated:1", "--bench", "--size", size, "--out",
			out, "--dir", work)
		text, _ := cmd.CombinedOutput()
		return cmd.ProcessState.ExitCode(), string(text)
	}
	status, said := run("900TiB")
	require.Equal(t, 2, status, said)
	require.Contains(t, said, "943721472 MiB are needed: choose another folder with --dir, or a smaller --size")
	status, said = run("64m")
	require.Equal(t, 1, status, said)
	require.Contains(t, said, "\nwarm/a row: 1.00\n\n")
}

func TestRunScriptRefusesNonsense(t *testing.T) {
	dir := bundle(t, "exit 0")
	for want, args := range map[string][]string{
		"there is no option --nonsense": {"--nonsense"}, "--gpus x": {"--gpus", "x"}, "--time 0": {"--time", "0"},
		"needs a value": {"--out"}, "there is no step dance": {"--gpus", "0", "dance"},
		"cannot be written": {"--gpus", "0", "--out", t.TempDir(), "--dir", "/nonexistent"},
	} {
		cmd := exec.Command(filepath.Join(dir, "run.sh"), args...)
		said, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Equal(t, 2, cmd.ProcessState.ExitCode(), string(said))
		require.Contains(t, string(said), want)
	}
	out, err := exec.Command(filepath.Join(dir, "run.sh"), "--list", "--gpus", "0,1").CombinedOutput()
	require.NoError(t, err)
	require.Equal(t, "bench-tests\ncuda\nclient-go\npagecache\nrandom-1\nrandom-2\nstress\nc\npython\nbench\ngaiafs-bench\ncuda-bench\npagecache-bench\n", string(out))
}
