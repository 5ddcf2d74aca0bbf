package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRequestsAreCounted checks that requests are counted by kind, with their durations.
func TestRequestsAreCounted(t *testing.T) {
	s := mount(t)
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("text"), 0o600))
	_, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	got := s.Server.Requests()
	for _, kind := range []string{"lookup", "create", "write", "read", "remove"} {
		require.Positive(t, got[kind].Count, "%s: %v", kind, got)
		require.Positive(t, got[kind].Mean, kind)
	}
	require.NotContains(t, got, "rename")
}
