package demo

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// programVariable makes a test process run as one of the demo's programs.
const programVariable = "GAIAFS_TEST_DEMO_PROGRAM"

func TestMain(m *testing.M) {
	testmount.Main()
	if os.Getenv(programVariable) != "" {
		if err := Work(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// The programs map memory that stands in for that of GPUs.
func TestRunOnGPUs(t *testing.T) {
	library := fakecuda.Dir(t)
	pictures, err := Photos()
	require.NoError(t, err)
	for devices, want := range map[int][2]string{1: {"CPU program", "gpu0 program"},
		2: {"gpu0 program", "gpu1 program"}} {
		dir := t.TempDir()
		report, err := Run(context.Background(), Options{Pictures: pictures, Width: 400, Directory: dir,
			Output: filepath.Join(dir, "out.png"),
			Mount: func(_ context.Context, source, mountpoint string) (func() error, error) {
				m := testmount.Start(t, testmount.Options{Source: source, Mountpoint: mountpoint, Devices: devices,
					Disguised: true})
				return func() error { m.Stop(); return nil }, nil
			},
			Program: func(ctx context.Context) *exec.Cmd {
				cmd := exec.CommandContext(ctx, "/proc/self/exe")
				cmd.Env = append(os.Environ(), programVariable+"=1", "LD_LIBRARY_PATH="+library)
				return cmd
			},
		})
		require.NoError(t, err)
		require.Equal(t, want, [2]string{report.CPU.Program, report.Device.Program})
		require.Equal(t, "cuda", report.Device.Kind)
		require.Equal(t, report.Device.ExpectedPages, report.Device.Pages)
		require.Equal(t, report.CPU.ExpectedPages, report.CPU.Pages)
	}
}
