package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache"
)

// TestRightsTakenAway: rights to a file are taken away, through the mount or in SOURCE. A client that maps the file
// after that gets other memory than earlier clients.
func TestRightsTakenAway(t *testing.T) {
	requireRoot(t)
	testdevice.Emulated(t, "the numbers are those of extents of 2 MiB")
	list := acl([3]uint32{aclUserObj, 6, noID}, [3]uint32{aclUser, 0, bob}, [3]uint32{aclGroupObj, 4, noID},
		[3]uint32{aclMask, 4, noID}, [3]uint32{aclOther, 4, noID})
	for name, c := range map[string]struct {
		take   func(mnt, source string) error
		shares bool
	}{
		"nothing":     {func(_, _ string) error { return nil }, true},
		"more rights": {func(mnt, _ string) error { return os.Chmod(mnt, 0o777) }, true},
		"times": {func(mnt, _ string) error { return unix.UtimesNano(mnt, make([]unix.Timespec, 2)) },
			true},
		"chmod":             {func(mnt, _ string) error { return os.Chmod(mnt, 0o600) }, false},
		"chown":             {func(mnt, _ string) error { return os.Chown(mnt, bob, -1) }, false},
		"chgrp":             {func(mnt, _ string) error { return os.Chown(mnt, -1, staff) }, false},
		"setfacl":           {func(mnt, _ string) error { return unix.Setxattr(mnt, accessACL, list, 0) }, false},
		"there and back":    {func(mnt, _ string) error { _ = os.Chmod(mnt, 0o600); return os.Chmod(mnt, 0o666) }, false},
		"chmod in SOURCE":   {func(_, source string) error { return os.Chmod(source, 0o600) }, false},
		"setfacl in SOURCE": {func(_, source string) error { return unix.Setxattr(source, accessACL, list, 0) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, cache, n := mountWithDevices(t, 1)
			path := filepath.Join(s.mnt, "f")
			require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0o666))
			require.NoError(t, os.Chmod(path, 0o666))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			had := mapAs(t, cache, n, f, pagecache.MapRequest{Len: 10, Writable: true, User: bob})
			require.NoError(t, c.take(path, filepath.Join(s.source, "f")))
			next := mapAs(t, cache, n, f, pagecache.MapRequest{Len: 10, Writable: true, User: alice})
			had.store(t, 0, []byte("bob"))
			seen := next.load(t, 3)
			if c.shares {
				assert.Equal(t, "bob", seen)
			} else {
				assert.Equal(t, "012", seen)
			}
			next.close(t)
			had.close(t)
		})
	}
}
