package gaiafs

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
)

func TestGroup(t *testing.T) {
	startDaemon(t, &controltest.Cache{})
	var mappings []*Mapping
	var files []*os.File
	for _, name := range []string{"a", "b"} {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		require.NoError(t, err)
		defer f.Close()
		require.NoError(t, f.Truncate(8192))
		m, err := Map(f, 0, 8192, ProtWrite, 0)
		require.NoError(t, err)
		mappings, files = append(mappings, m), append(files, f)
	}
	a, b := mappings[0], mappings[1]
	g, err := Begin(a.Whole(), b.Whole())
	require.NoError(t, err)
	for _, m := range mappings {
		_, err := m.WriteAt([]byte("together"), 4096)
		require.NoError(t, err)
	}
	version, err := AcquireAll(a.Whole(), b.Whole())
	require.NoError(t, err)
	require.Zero(t, version)
	_, err = AcquireAtLeast(1, 10*time.Millisecond, a.Whole())
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	version, err = g.Release()
	require.NoError(t, err)
	require.EqualValues(t, 1, version)
	for _, f := range files {
		got := make([]byte, 8)
		_, err := f.ReadAt(got, 4096)
		require.NoError(t, err)
		require.Equal(t, "together", string(got))
	}
	version, err = AcquireAtLeast(1, time.Minute, b.Whole())
	require.NoError(t, err)
	require.EqualValues(t, 1, version)
	_, err = g.Release()
	require.ErrorIs(t, err, syscall.EINVAL)
	require.NoError(t, g.Abort())

	for _, wrong := range [][]Range{nil, {{a, 0, 0}}, {{a, 8192, 1}}, {{a, -1, 1}}, make([]Range, maxGroupRanges+1)} {
		_, err := Begin(wrong...)
		require.ErrorIs(t, err, syscall.EINVAL)
	}
	many := make([]Range, 100_000)
	for i := range many {
		many[i] = Range{mappings[i%2], int64(i) % 8192, 1}
	}
	g, err = Begin(many...)
	require.NoError(t, err)
	require.NoError(t, b.Close())
	_, err = g.Release()
	require.ErrorIs(t, err, syscall.EBADF)
	require.NoError(t, g.Abort())
	_, err = Begin(b.Whole())
	require.ErrorIs(t, err, syscall.EBADF)
	require.NoError(t, a.Close())
}

// TestGroupOfAnOldDaemon: the error names the cause.
func TestGroupOfAnOldDaemon(t *testing.T) {
	m := &Mapping{length: 4096, conn: &conn{welcome: welcome{version: 2, offered: featureView | featureLarge}}}
	_, err := Begin(m.Whole())
	require.ErrorIs(t, err, syscall.ENOTSUP)
	require.ErrorContains(t, err, "older than this library")
	_, err = AcquireAll(m.Whole())
	require.ErrorIs(t, err, syscall.ENOTSUP)
}
