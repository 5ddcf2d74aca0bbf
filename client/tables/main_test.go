package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGeneratedFilesAreCurrent fails where a table, or a file that is made of it, was changed alone.
func TestGeneratedFilesAreCurrent(t *testing.T) {
	for _, o := range generated {
		rows, err := read(o.table, o.columns)
		require.NoError(t, err)
		require.NotEmpty(t, rows)
		got, err := os.ReadFile(o.path)
		require.NoError(t, err)
		require.Equal(t, o.text(rows), string(got), "%s: run go generate ./client/tables", o.path)
	}
}
