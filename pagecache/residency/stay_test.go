package residency

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPinnedKeysStay: extents of pinned Keys are not evicted; those of a limited user only within the user's share, the
// oldest first.
func TestPinnedKeysStay(t *testing.T) {
	d, _ := newDevice(t, 8, 0.25)
	first, second, others := newKey(t, d), newKey(t, d), newKey(t, d)
	limited := Tenant{User: 7, Limited: true}
	first.pinned.Store(&limited)
	second.pinned.Store(&limited)
	first.idle(t, 0, 2)
	second.idle(t, 0, 1)
	second.idle(t, 1, 2)
	require.NoError(t, d.CheckPinned(Tenant{User: 1}, 4*granule))
	require.ErrorIs(t, d.CheckPinned(Tenant{User: 1}, 5*granule), syscall.ENOSPC)
	require.ErrorIs(t, d.CheckPinned(limited, granule), syscall.EDQUOT)
	s := d.Status()
	require.Equal(t, []UserPins{{7, 4 * granule}}, s.Pins)
	require.EqualValues(t, 2*granule, s.PinnedIdle)

	o := soon(t, others.taking(0, 0, 4))
	more := soon(t, others.taking(0, 4, 6)) // two of the user's four extents stay
	require.Len(t, first.Extents(granules(0, 2)), 1)
	require.Empty(t, second.Extents(granules(0, 2)))
	failed := <-others.taking(0, 6, 7)
	require.ErrorIs(t, failed.err, syscall.ENOMEM)
	require.ErrorContains(t, failed.err, "128 KiB are pinned by user 7 and not mapped")
	first.pinned.Store(nil)
	soon(t, others.taking(0, 6, 7)).Free()
	more.Free()
	o.Free()
}
