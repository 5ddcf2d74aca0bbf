package arrows

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// longest is the maximum length of a function in the rooms, in lines from func to the closing brace.
const longest = 59

// rooms are the folders in which functions must be short, relative to the root.
var rooms = []string{
	"lrc", "pagecache", "pagecache/residency", "pagecache/residency/policy", "pagecache/residency/tenants",
	"pagecache/mover",
	"pagecache/mover/schedule", "pagecache/cleanread", "pagecache/view",
}

// TestFunctionsAreShort fails if a function of the rooms is too long to read at a glance. Split such a function by
// meaning.
func TestFunctionsAreShort(t *testing.T) {
	for _, room := range rooms {
		files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(room), "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, room)
		for _, path := range files {
			if !strings.HasSuffix(path, "_test.go") {
				requireShort(t, path)
			}
		}
	}
}

func requireShort(t *testing.T, path string) {
	t.Helper()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			from, to := set.Position(f.Pos()), set.Position(f.End())
			if n := to.Line - from.Line + 1; n > longest {
				t.Errorf("%s:%d: %s has %d lines; %d are allowed", from.Filename, from.Line, f.Name.Name, n,
					longest)
			}
		}
	}
}
