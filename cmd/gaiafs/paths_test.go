package main

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// An error names its file once. It does not repeat the library's prefix, which the command prints itself.
func TestErrorsNameAFileOnce(t *testing.T) {
	refused := &gaiafs.Error{Op: "profile", Errno: syscall.EPERM, Text: "only root may"}
	for _, c := range []struct {
		part string
		err  error
		says string
	}{
		{"", pathError("dir/model", syscall.EACCES),
			"dir/model: permission denied: you need permission to read a file to see it or " +
				"bring it to devices"},
		{"gpu0", pathError("dir/model", syscall.ENOENT), "dir/model does not exist: check the spelling"},
		{"gpu0", syscall.EIO, "dir/model: gpu0: input/output error"},
		{"", refused, "dir/model: operation not permitted: only root may"},
		{"gpu1", fmt.Errorf("half of it: %w",
			refused), "dir/model: gpu1: half of it: gaiafs: profile: operation not permitted: only root may"},
	} {
		err := about("dir/model", c.part, c.err)
		require.EqualError(t, err, c.says)
		require.ErrorIs(t, err, c.err)
	}
	require.NoError(t, about("dir/model", "", nil))
}
