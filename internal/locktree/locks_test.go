package locktree

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// locked are the folders whose locks are in docs/dev/locks.md, including everything below them.
var locked = []string{"fs", "control", "pagecache"}

// locks returns the locks in the types of a file: package.Type.field.
func locks(file *ast.File) (names []string) {
	var fields func(owner string, s *ast.StructType)
	fields = func(owner string, s *ast.StructType) {
		for _, f := range s.Fields.List {
			typ := f.Type
			if a, is := typ.(*ast.ArrayType); is {
				typ = a.Elt
			}
			in, nested := typ.(*ast.StructType)
			lock := regexp.MustCompile(`^(sync\.(RW)?Mutex|fileLock)$`).MatchString(text(typ))
			switch {
			case lock && len(f.Names) == 0:
				names = append(names, owner+"."+strings.TrimPrefix(text(typ), "sync."))
			case lock:
				for _, n := range f.Names {
					names = append(names, owner+"."+n.Name)
				}
			case nested: // a shard's lock has the name of the shards
				before := len(names)
				fields(owner, in)
				for i := range names[before:] {
					names[before+i] = owner + "." + f.Names[0].Name
				}
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		t, is := n.(*ast.TypeSpec)
		if !is {
			return true
		}
		if s, is := t.Type.(*ast.StructType); is {
			fields(file.Name.Name+"."+t.Name.Name, s)
		}
		return false
	})
	return names
}

// text returns a type's name, or "" if it is not a name.
func text(typ ast.Expr) string {
	switch x := typ.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		return fmt.Sprint(text(x.X), ".", x.Sel.Name)
	}
	return ""
}

// TestLocksAreOnThePage compares the tree in docs/dev/locks.md with the source.
func TestLocksAreOnThePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/dev/locks.md")
	require.NoError(t, err)
	named := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^ *([a-z]+\.[A-Za-z]+\.[A-Za-z]+) `).FindAllStringSubmatch(string(page),
		-1) {
		require.False(t, named[m[1]], "%s is on the page twice", m[1])
		named[m[1]] = true
	}
	require.NotEmpty(t, named)
	for _, folder := range locked {
		require.NoError(t, filepath.WalkDir("../../"+folder, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
				strings.Contains(path, "controltest") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, name := range locks(file) {
				if !named[name] {
					t.Errorf("%s has the lock %s: say in docs/dev/locks.md when it is taken and what it protects", path,
						name)
				}
				delete(named, name)
			}
			return nil
		}))
	}
	for name := range named {
		t.Errorf("docs/dev/locks.md has the lock %s, which does not exist", name)
	}
}
