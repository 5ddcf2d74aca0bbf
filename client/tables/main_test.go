package main

import (
	"go/format"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGeneratedFilesAreCurrent fails where the table, or a file that is made of it, was changed alone.
func TestGeneratedFilesAreCurrent(t *testing.T) {
	rows, err := read("cuda_errors.txt")
	require.NoError(t, err)
	require.NotEmpty(t, rows)
	for path, text := range generated {
		got, err := os.ReadFile(filepath.Join("..", path))
		require.NoError(t, err)
		require.Equal(t, text(rows), string(got), "%s: run go generate ./client/tables", path)
		if strings.HasSuffix(path, ".go") {
			formatted, err := format.Source(got)
			require.NoError(t, err)
			require.Equal(t, string(formatted), string(got), path)
		}
	}
}
