package ctest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// startGPUs starts a daemon with two devices, which clients map with the fake libcuda of that folder. A client fails if
// it exits with anything still imported, mapped or reserved.
func startGPUs(t *testing.T, libcuda string, env ...string) *daemon {
	d := startDaemon(t, &controltest.Cache{
		Devices: 2,
		Kind:    uint8(gpubackend.KindCUDA),
		UUIDs:   []gpubackend.UUID{fakecuda.UUID(0), fakecuda.UUID(1)},
	})
	d.env = append([]string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_LEAKS=1"}, env...)
	return d
}

// skipForks skips forks of processes with threads under sanitizers. In the child, the sanitizer's allocator or list of
// threads is locked if a thread was using it. Every process that maps something of a mount, or uses CUDA, has threads.
func skipForks(t *testing.T, build, scenario string) {
	if (build == "thread" || build == "address") && scenario == "forks" {
		t.Skipf("the %s sanitizer does not support what children of processes with threads do", build)
	}
}

func TestCUDA(t *testing.T) {
	libcuda := fakecuda.Dir(t)
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "cuda", build)
			for _, scenario := range []string{"basic", "bad", "stream-order", "default-stream", "null-stream",
				"wrong-stream",
				"munmap-waits", "forks", "forks-before", "threads", "bounded", "release-waits", "drop", "copies",
				"held", "lent-context"} {
				t.Run(scenario, func(t *testing.T) {
					skipForks(t, build, scenario)
					d := startGPUs(t, libcuda)
					d.run(client, scenario, d.file())
					d.waitMapped(0)
				})
			}
			t.Run("late-failure", func(t *testing.T) {
				d := startGPUs(t, libcuda)
				cmd, expect, answer := d.talk(client, "late-failure", d.file())
				expect("queued")
				d.stop()
				_, err := answer.Write([]byte{1})
				require.NoError(t, err)
				require.NoError(t, cmd.Wait())
			})
			t.Run("late-failure-at-msync", func(t *testing.T) {
				d := startGPUs(t, libcuda)
				var asked atomic.Int32
				d.cache.Gate = func(context.Context) error {
					if asked.Add(1) == 1 {
						return syscall.EIO
					}
					return nil
				}
				d.run(client, "late-failure-at-msync", d.file())
				d.waitMapped(0)
			})
			t.Run("callbacks-do-not-wait", func(t *testing.T) {
				d := startGPUs(t, libcuda)
				asked, open := make(chan struct{}), make(chan struct{})
				d.cache.Gate = func(context.Context) error {
					close(asked)
					<-open
					return nil
				}
				cmd, expect, answer := d.talk(client, "callbacks-do-not-wait", d.file())
				defer time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() }).Stop()
				expect("queued")
				<-asked
				_, err := answer.Write([]byte{1})
				require.NoError(t, err)
				expect("ran")
				close(open)
				_, err = answer.Write([]byte{1})
				require.NoError(t, err)
				require.NoError(t, cmd.Wait())
			})
			t.Run("lost-context", func(t *testing.T) {
				d := startGPUs(t, libcuda)
				d.env = []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_FAIL=cuStreamQuery:700,cuMemFree:700",
					"ASAN_OPTIONS=detect_leaks=0"}
				d.run(client, "lost-context", d.file())
				d.waitMapped(0)
			})
		})
	}
}

// TestGraphs captures streams into graphs.
func TestGraphs(t *testing.T) {
	libcuda, old := fakecuda.Dir(t), fakecuda.Dir(t, "-DOLD_DRIVER")
	for name := range builds {
		t.Run(name, func(t *testing.T) {
			client := compile(t, "cuda", name)
			d := startGPUs(t, libcuda)
			d.run(client, "graphs", d.file())
			for _, call := range []string{"cuStreamGetCaptureInfo_v2", "cuUserObjectCreate", "cuGraphRetainUserObject",
				"cuLaunchHostFunc",
				"cuStreamWaitValue32", "cuMemHostRegister", "cuMemHostGetDevicePointer"} {
				d := startGPUs(t, libcuda, "FAKECUDA_FAIL="+call+":2")
				d.run(client, "failing-capture", d.file())
				d.waitMapped(0)
			}
			d = startGPUs(t, old)
			d.run(client, "old-driver", d.file())
			d.waitMapped(0)
		})
	}
}

// TestCUDAFailures makes each call of libcuda fail that making a mapping needs. The mapping must fail with a message,
// and leave nothing in the client or the daemon.
func TestCUDAFailures(t *testing.T) {
	libcuda := fakecuda.Dir(t)
	client := compile(t, "cuda", "address")
	for _, c := range []struct{ call, says string }{
		{"cuInit:999", "cuInit"},
		{"cuDeviceGetCount:3", "cuDeviceGetCount"},
		{"cuDeviceGet:101", "cuDeviceGet"},
		{"cuDeviceGetUuid_v2:3", "cuDeviceGetUuid"},
		{"cuDevicePrimaryCtxRetain:2", "cuDevicePrimaryCtxRetain"},
		{"cuCtxPushCurrent:2", "cuCtxPushCurrent"},
		{"cuMemImportFromShareableHandle:2", "cuMemImportFromShareableHandle"},
		{"cuMemImportFromShareableHandle:2:1", "cuMemImportFromShareableHandle"},
		{"cuMemAddressReserve:2", "cuMemAddressReserve"},
		{"cuMemMap:2", "cuMemMap"},
		{"cuMemMap:2:1", "cuMemMap"},
		{"cuMemSetAccess:2", "cuMemSetAccess"},
	} {
		t.Run(c.call, func(t *testing.T) {
			d := startGPUs(t, libcuda, "FAKECUDA_FAIL="+c.call)
			d.run(client, "failing", d.file(), c.says)
			d.waitMapped(0)
		})
	}
	// If something cannot be given back, the rest still is. The address sanitizer would find what the fake keeps.
	client = compile(t, "cuda", "plain")
	t.Run("cuMemRelease", func(t *testing.T) {
		d := startGPUs(t, libcuda)
		d.env = []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_FAIL=cuMemRelease:2"}
		require.Contains(t, d.run(client, "refused", d.file(), "0"), "12 cuMemRelease failed")
		d.waitMapped(0)
	})
	for _, call := range []string{"cuMemUnmap:999", "cuMemAddressFree:999"} {
		t.Run(call, func(t *testing.T) {
			d := startGPUs(t, libcuda)
			d.env = []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_FAIL=" + call}
			d.run(client, "failing-unmap", d.file())
			d.waitMapped(0)
		})
	}
	for _, call := range []string{"cuLaunchHostFunc", "cuStreamWaitValue32", "cuMemHostRegister",
		"cuMemHostGetDevicePointer"} {
		t.Run(call, func(t *testing.T) {
			d := startGPUs(t, libcuda, "FAKECUDA_FAIL="+call+":2")
			d.run(client, "no-launch", d.file(), call)
			d.waitMapped(0)
		})
	}
}

// TestFullDevice ends a mapping while a stream is captured and the device has no free byte. The mapping's memory must
// stay.
func TestFullDevice(t *testing.T) {
	d := startGPUs(t, fakecuda.Dir(t))
	d.env = []string{d.env[0], "FAKECUDA_FAIL=cuMemAlloc:2"}
	d.run(compile(t, "cuda", "plain"), "full-device", d.file())
	d.waitMapped(0)
}

func TestCUDARefusals(t *testing.T) {
	libcuda := fakecuda.Dir(t)
	client := compile(t, "cuda", "plain")
	t.Run("no libcuda", func(t *testing.T) {
		if _, err := os.Stat("/dev/nvidiactl"); err == nil {
			t.Skip("this machine has libcuda.so.1")
		}
		d := startGPUs(t, libcuda)
		d.env = nil
		require.Regexp(t, `^19 .*libcuda.so.1 cannot be loaded here.*driver`, d.run(client, "refused", d.file(), "0"))
		d.waitMapped(0)
	})
	t.Run("not visible", func(t *testing.T) {
		d := startGPUs(t, libcuda, "FAKECUDA_DEVICES=1", "CUDA_VISIBLE_DEVICES=0")
		require.Equal(t, "19 there is no CUDA device 1: this process sees 1, with CUDA_VISIBLE_DEVICES=0\n",
			d.run(client, "refused", d.file(), "1"))
	})
	t.Run("none visible", func(t *testing.T) {
		d := startGPUs(t, libcuda, "FAKECUDA_DEVICES=0")
		require.Contains(t, d.run(client, "refused", d.file(), "0"), "CUDA_VISIBLE_DEVICES")
	})
	t.Run("not the mount's", func(t *testing.T) {
		d := startGPUs(t, libcuda, "FAKECUDA_DEVICES=3")
		require.Regexp(t, `^19 `, d.run(client, "refused", d.file(), "2"))
	})
	t.Run("libcuda is not loaded for emulated devices", func(t *testing.T) {
		d := startDaemon(t, &controltest.Cache{})
		// A program that loaded this library would report it.
		d.env = []string{"LD_LIBRARY_PATH=" + libcuda, "LD_DEBUG=files"}
		require.NotContains(t, d.run(compile(t, "client", "plain"), "basic", d.file()), "libcuda")
	})
}

// TestCUDAOnAMount maps files of a mount, with the ioctl and the whole daemon.
func TestCUDAOnAMount(t *testing.T) {
	libcuda := fakecuda.Dir(t)
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "cuda", build)
			m := testmount.Start(t, testmount.Options{Devices: 2, Memory: 512 << 20, Disguised: true, Poison: true})
			d := &daemon{t: t, dir: m.Dir, env: []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_LEAKS=1"}}
			for _, scenario := range []string{"basic", "many", "stream-order", "munmap-waits", "forks", "threads"} {
				t.Run(scenario, func(t *testing.T) {
					skipForks(t, build, scenario)
					d.t = t
					d.run(client, scenario, d.file())
				})
			}
		})
	}
}

// TestKernelsUseKeptBrackets has kernels use brackets that the client has kept, while others need the memory.
func TestKernelsUseKeptBrackets(t *testing.T) {
	libcuda, old := fakecuda.Dir(t), fakecuda.Dir(t, "-DOLD_DRIVER")
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "cuda", build)
			m := testmount.Start(t, testmount.Options{Memory: 24 << 20, Disguised: true, Poison: true})
			d := &daemon{t: t, dir: m.Dir, env: []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_LEAKS=1"}}
			for _, scenario := range []string{"kernels-use-kept", "streams-of-threads", "many-streams",
				"drop-movable"} {
				path := m.Path(scenario)
				require.NoError(t, os.WriteFile(path, nil, 0o600))
				require.NoError(t, os.Truncate(path, 64<<20))
				d.run(client, scenario, path)
			}
			d.env[0] = "LD_LIBRARY_PATH=" + old
			d.run(client, "streams-of-threads", m.Path("streams-of-threads"))
			d.env = append(d.env, "FAKECUDA_LATE=1") // brackets end before gaia_done has returned
			d.run(client, "streams-of-threads", m.Path("streams-of-threads"))
		})
	}
}

// TestExamplesNeedNvcc: without nvcc, make says what to install.
func TestExamplesNeedNvcc(t *testing.T) {
	out, err := exec.Command("make", "-C", "../examples", "NVCC=/nonexistent/nvcc").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "the examples need /nonexistent/nvcc, which comes with the CUDA toolkit")
}

// TestProgramsCompile compiles the examples and the tests of ../gputest if there is nvcc. ../gputest/run.sh runs them
// on a GPU.
func TestProgramsCompile(t *testing.T) {
	if _, err := exec.LookPath("nvcc"); err != nil {
		t.Skip(err)
	}
	programs, err := filepath.Glob("../*/*.cu")
	require.NoError(t, err)
	require.NotEmpty(t, programs)
	for _, program := range programs {
		t.Run(filepath.Base(program), func(t *testing.T) {
			out, err := exec.Command("nvcc", "-c", "-std=c++17", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra",
				"-I..",
				"-o", filepath.Join(t.TempDir(), "program.o"), program).CombinedOutput()
			if strings.Contains(string(out), "cublas_v2.h") {
				t.Skip("cuBLAS is not installed")
			}
			require.NoError(t, err, "%s", out)
		})
	}
}
