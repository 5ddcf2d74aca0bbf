package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGeneratedFilesAreCurrent fails if only a table, or only a generated file, was changed.
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
