package fs

import (
	"os"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestNothingIsDoneAsAnotherThanTheCaller: if the thread cannot become the caller, the call is not made. The kernel
// does not report that failure.
func TestNothingIsDoneAsAnotherThanTheCaller(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to act as others")
	}
	c, err := newCreator()
	require.NoError(t, err)
	done := false
	call := func() error { done = true; return nil }
	const nobody = ^uint32(0) // the number that no user has
	for _, who := range []fuse.Caller{{Owner: fuse.Owner{Uid: nobody}}, {Owner: fuse.Owner{Gid: nobody}}} {
		require.ErrorIs(t, c.as(&who, call), unix.EPERM)
		require.False(t, done)
	}
	require.NoError(t, c.as(&fuse.Caller{Owner: fuse.Owner{Uid: 1, Gid: 1}}, call))
	require.True(t, done)
}
