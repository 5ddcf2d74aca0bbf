package pagecache

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestAbortedPlansKeepNothing makes home fail before it is changed. A concurrent write, an ordinary write and a collect
// must leave everything as it was.
func TestAbortedPlansKeepNothing(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(4 * page.Size)
	a := m.run(src, 0, 0, 4*page.Size, true)
	b := m.run(src, 1, 0, 4*page.Size, true)
	f := src.attached
	state := func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.lrc.CheckEnded()
		require.Zero(t, f.bases.n)
		require.Empty(t, f.bases.blocks)
		return f.lrc.Dump()
	}
	before := state()
	never := func(off, n int64) error {
		t.Error("home is changed although its bytes are not kept")
		return nil
	}
	src.home.failReads(syscall.EIO)
	for _, c := range []Change{
		{Kind: ChangeWrite, Off: 1, Len: 1},
		{Kind: ChangeWrite, Off: 0, Len: 3 * page.Size},
		{Kind: ChangeZero, Off: page.Size, Len: page.Size},
	} {
		require.ErrorIs(t, f.ChangeHome(t.Context(), c, never), syscall.EIO)
		require.Equal(t, before, state())
	}
	src.home.failReads(nil)
	a.add(2 * page.Size)
	require.EqualValues(t, 1, a.release())
	released := state()
	src.home.failReads(syscall.EIO)
	require.ErrorIs(t, f.Sync(t.Context(), nil), syscall.EIO)
	require.Equal(t, released, state())
	src.home.failReads(nil)
	require.NoError(t, f.Sync(t.Context(), nil))
	require.EqualValues(t, 1, b.acquire())
	require.Equal(t, a.all(), b.all())
	require.NotEqual(t, released, state())
}
