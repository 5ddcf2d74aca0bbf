package residency

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// lockedFile is a LockedFile of a test.
type lockedFile struct {
	by     Tenant
	pinned bool
}

func (f *lockedFile) PinnedOnHost() (by Tenant, pinned bool) { return f.by, f.pinned }

// TestLockedFilesOverTheLimit: a limit below what files have locked leaves nothing, for extents and for further files.
func TestLockedFilesOverTheLimit(t *testing.T) {
	p, first, next := NewPinned(8*granule), &lockedFile{pinned: true}, &lockedFile{pinned: true}
	m, err := p.LockFile(t.Context(), first, 4*granule)
	require.NoError(t, err)
	require.EqualValues(t, 4*granule, p.forExtents())
	p.SetLimit(granule)
	require.True(t, p.Over())
	require.Zero(t, p.forExtents())
	err = p.CheckFile(next, next.by, granule)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ErrorContains(t, err, "pinned files leave 0 B")
	first.pinned = false
	require.False(t, p.Over(), "its memory is retired")
	require.EqualValues(t, granule, p.forExtents())
	require.NoError(t, p.CheckRoom(next, granule))
	require.EqualValues(t, 4*granule, p.Files())
	m.Free()
	require.Zero(t, p.Files())
	p.requirePinned(t, 0, 0)
}

// TestLockedFilesBesideSpares: a file gets the memory of spares. To ask whether there is room frees none.
func TestLockedFilesBesideSpares(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 4)
	p, file := d.pinned, &lockedFile{pinned: true}
	mem, _, err := p.take(d, granule, 0)
	require.NoError(t, err)
	require.ErrorIs(t, p.CheckRoom(file, 4*granule), syscall.ENOSPC)
	p.put(d, mem, nil)
	require.NoError(t, p.CheckRoom(file, 4*granule))
	require.NoError(t, p.CheckRoom(file, 2*granule))
	p.requirePinned(t, 1, 1)
	m, err := p.LockFile(t.Context(), file, 4*granule)
	require.NoError(t, err)
	p.requirePinned(t, 4, 0)
	m.Free()
	p.requirePinned(t, 0, 0)

	require.NoError(t, p.room(granule, nil))
	made := p.begin(granule)
	require.NoError(t, p.CheckRoom(file, 4*granule), "it may become a spare")
	made()
	require.ErrorIs(t, p.CheckRoom(file, 4*granule), syscall.ENOSPC)
	p.unused(granule)
}

// TestWaitForLockedFile: a file waits for retired memory of another one. It takes nothing if it gives up.
func TestWaitForLockedFile(t *testing.T) {
	p, first, next := NewPinned(4*granule), &lockedFile{pinned: true}, &lockedFile{pinned: true}
	m, err := p.LockFile(t.Context(), first, 3*granule)
	require.NoError(t, err)
	_, err = p.LockFile(t.Context(), next, 2*granule)
	require.ErrorIs(t, err, syscall.ENOSPC)
	m.Retire()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.LockFile(ctx, next, 2*granule)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, p.WaitRetired(ctx), context.Canceled)
	p.requirePinned(t, 3, 0)
	require.EqualValues(t, 3*granule, p.Files())

	waiting := &FileMemory{p: p, file: &lockedFile{}, bytes: 2 * granule}
	p.files[waiting] = struct{}{}
	require.EqualValues(t, 3*granule, p.retiredLocked(), "what waits uses nothing that it could give back")
	waiting.Free()
	p.requirePinned(t, 3, 0)

	go m.Free()
	n, err := p.LockFile(t.Context(), next, 4*granule)
	require.NoError(t, err)
	p.requirePinned(t, 4, 0)
	n.Free()
}

// TestHotFiles: hot files have half as much memory as the pool, in addition to it. A pin makes it part of the pool.
func TestHotFiles(t *testing.T) {
	p, file, other := NewPinned(8*granule), &lockedFile{}, &lockedFile{pinned: true}
	_, err := p.LockHot(file, 5*granule)
	require.ErrorIs(t, err, syscall.ENOSPC)
	m, err := p.LockHot(file, 3*granule)
	require.NoError(t, err)
	n, err := p.LockHot(&lockedFile{}, granule)
	require.NoError(t, err)
	_, err = p.LockHot(&lockedFile{}, 1)
	require.ErrorIs(t, err, syscall.ENOSPC)
	n.Free()
	p.requirePinned(t, 0, 0)
	require.EqualValues(t, 3*granule, p.Hot())
	require.EqualValues(t, 8*granule, p.forExtents())
	o, err := p.LockFile(t.Context(), other, 6*granule)
	require.NoError(t, err)

	file.pinned = true
	require.False(t, m.Pin(), "there is no room")
	require.True(t, m.IsHot())
	o.Free()
	require.True(t, m.Pin())
	require.True(t, m.Pin(), "it is already")
	require.Zero(t, p.Hot())
	p.requirePinned(t, 3, 0)
	require.EqualValues(t, 5*granule, p.forExtents())
	m.Free()
	p.requirePinned(t, 0, 0)

	m, err = p.LockHot(file, 4*granule)
	require.NoError(t, err)
	require.False(t, p.HotOver())
	p.SetLimit(8*granule - 1)
	require.True(t, p.HotOver())
	go m.Free()
	require.NoError(t, p.WaitRetired(t.Context()))
	require.Zero(t, p.Hot())
}

// TestLockedForAnotherUser: what a file has locked counts for nobody but its owner.
func TestLockedForAnotherUser(t *testing.T) {
	first, second := Tenant{User: 1, Limited: true}, Tenant{User: 2, Limited: true}
	p, file, other := NewPinned(8*granule), &lockedFile{first, true}, &lockedFile{second, true}
	p.SetShare(0.5)
	m, err := p.LockFile(t.Context(), file, 4*granule)
	require.NoError(t, err)
	defer m.Free()
	n, err := p.LockFile(t.Context(), other, granule)
	require.NoError(t, err)
	defer n.Free()
	require.NoError(t, p.CheckFile(file, first, 4*granule))
	require.ErrorIs(t, p.CheckFile(file, second, 4*granule), syscall.EDQUOT)
	require.NoError(t, p.CheckFile(file, second, 3*granule))
}

// TestRetiredHotFileThatIsFreed counts for nothing any more.
func TestRetiredHotFileThatIsFreed(t *testing.T) {
	p := NewPinned(8 * granule)
	m, err := p.LockHot(&lockedFile{}, 3*granule)
	require.NoError(t, err)
	m.Retire()
	m.Free()
	m, err = p.LockHot(&lockedFile{}, 3*granule)
	require.NoError(t, err)
	p.SetLimit(4 * granule)
	require.True(t, p.HotOver())
	m.Free()
	require.False(t, p.HotOver())
}
