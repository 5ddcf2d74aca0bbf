package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// A write of released bytes that fails halfway changes times and bytes of the backing file.
func TestFailedCollectIsNotADirectChange(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	p.release()
	src.home.fail(syscall.ENOSPC)
	require.ErrorIs(t, src.attached.Sync(context.Background(), func() error { return nil }), syscall.ENOSPC)
	_, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.Zero(t, m.cache.Status().Counters["home_replacements"])
	require.Equal(t, byte(1), src.read(t, 0, 1)[0])
	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.Equal(t, byte(1), src.home.bytes(0, 1)[0])
}

// The backing file is changed directly while released bytes are not home yet. Everybody must still see them, and fsync
// must bring them home.
func TestReleasedBytesSurviveADirectChange(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 1)
	p.release()
	p.store(page.Size, 3) // not released

	src.home.editAt(page.Size+9, []byte{7})
	changed, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, byte(1), src.read(t, 0, 1)[0])
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.Equal(t, byte(1), src.home.bytes(0, 1)[0])
	require.Equal(t, []byte{0, 7}, []byte{src.home.bytes(page.Size, 1)[0], src.home.bytes(page.Size+9, 1)[0]})
	q := m.run(src, 1, 0, 2*page.Size, false)
	require.Equal(t, byte(1), q.byteAt(0))
	p.release()
	require.Equal(t, byte(3), src.read(t, page.Size, 1)[0])
}
