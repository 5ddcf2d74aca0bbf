package stress

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/testdisk"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestSeveralCoresOnAFullDisk: several cores write home to holes of which the host's page cache has the pages. The disk
// has room for some of them. fsync says so, nothing is lost, and once there is room all of it is home.
func TestSeveralCoresOnAFullDisk(t *testing.T) {
	const size, left = 64 << 20, 24 << 20
	requireTool(t, "mkfs.ext4")
	disk, missing := testdisk.Mount(t, "ext4", 160<<20)
	if missing != "" {
		t.Skip(missing)
	}
	m := testmount.Start(t, testmount.Options{Source: disk, Env: []string{"GOMAXPROCS=8"},
		WriteBackInterval: 100 * time.Millisecond})
	path := m.Path("file")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, size))
	_, err := os.ReadFile(filepath.Join(disk, "file"))
	require.NoError(t, err)
	filler, err := os.Create(filepath.Join(disk, "filler"))
	require.NoError(t, err)
	defer filler.Close()
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(disk, &st))
	require.NoError(t, unix.Fallocate(int(filler.Fd()), 0, 0, int64(st.Bfree)*st.Bsize-left))

	g := gpu(t, path, size, 0)
	want := pattern(size, 3)
	store(t, g, 0, want...)
	_, err = g.Release(0, size)
	require.NoError(t, err)
	require.ErrorIs(t, fsync(t, path), unix.ENOSPC)
	requireBytes(t, want, mustRead(t, path), "on the mount, while the disk is full")
	require.NoError(t, filler.Truncate(0))
	require.NoError(t, fsync(t, path))
	sameEverywhere(t, m, "file", want)
	require.Greater(t, status(t, m).Counters["parallel_pages"], int64(size/4096/2))
	require.NoError(t, g.Close())
}
