package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A log is not written to a file that another user planted, but follows the user's own links.
func TestLogsOfOthersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make what belongs to another user")
	}
	const other = 4711
	tmp, home := t.TempDir(), t.TempDir()
	require.NoError(t, os.Chmod(tmp, os.ModeSticky|0o777))
	log, secret := filepath.Join(tmp, "log"), filepath.Join(home, "secret")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))

	require.NoError(t, os.Symlink(secret, log))
	require.NoError(t, os.Lchown(log, other, other))
	_, err := openLog(log)
	require.ErrorContains(t, err, "was made by user 4711")
	require.NoError(t, os.Lchown(log, os.Geteuid(), -1))
	f, err := openLog(log)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, os.Remove(log))

	require.NoError(t, os.WriteFile(log, nil, 0o666))
	require.NoError(t, os.Chown(log, other, other))
	_, err = openLog(log)
	require.ErrorContains(t, err, "choose another with --log-file")
	text, err := os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, "secret", string(text))

	f, err = openLog(filepath.Join(home, "new"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
}
