package plants

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// listed is go list's description of a package.
type listed struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
}

// TestPlantsCompile finds plants that no longer compile, because the functions that they call have changed. Otherwise
// only the go command would fail, and no test.
func TestPlantsCompile(t *testing.T) {
	plants := make(map[string][]plant) // by folder
	for _, p := range all() {
		plants["./"+path.Dir(p.file)] = append(plants["./"+path.Dir(p.file)], p)
	}
	args := []string{"list", "-json=ImportPath,Dir,Export,GoFiles", "-export", "-deps"}
	for folder := range plants {
		args = append(args, folder)
	}
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = "../..", os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	byPath, byDir := make(map[string]listed), make(map[string]listed)
	for d := json.NewDecoder(out); ; {
		var l listed
		if err := d.Decode(&l); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		byPath[l.ImportPath], byDir[l.Dir] = l, l
	}
	require.NoError(t, cmd.Wait())

	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser,
		error) {
		return os.Open(byPath[path].Export)
	})
	for folder, of := range plants {
		dir, err := filepath.Abs(filepath.Join("../..", folder))
		require.NoError(t, err)
		files := declarations(t, fset, byDir[dir])
		require.NotEmpty(t, files, folder)
		for _, p := range of {
			t.Run(p.name, func(t *testing.T) { p.requireTypes(t, fset, imports, byDir[dir].ImportPath, files) })
		}
	}
}

// declarations parses the files of a package without the bodies of functions, which would take most of the time.
func declarations(t *testing.T, fset *token.FileSet, l listed) map[string]*ast.File {
	t.Helper()
	files := make(map[string]*ast.File)
	for _, name := range l.GoFiles {
		file, err := parser.ParseFile(fset, filepath.Join(l.Dir, name), nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				f.Body = nil
			}
		}
		files[name] = file
	}
	return files
}

// requireTypes type-checks the altered file in its package, which files declare.
func (p plant) requireTypes(t *testing.T, fset *token.FileSet, imports types.Importer, path string,
	files map[string]*ast.File) {
	t.Helper()
	name := filepath.Base(p.file)
	altered, err := parser.ParseFile(fset, "altered "+name, p.planted(t), parser.SkipObjectResolution)
	require.NoError(t, err)
	all := []*ast.File{altered}
	for other, file := range files {
		if other != name {
			all = append(all, file)
		}
	}
	config := types.Config{Importer: imports, Error: func(err error) {
		// The other files have no bodies, so their imports seem unused.
		if at, ok := err.(types.Error); ok && fset.Position(at.Pos).Filename == "altered "+name {
			t.Error(err)
		}
	}}
	_, _ = config.Check(path, fset, all, nil) // Error collects the errors
}
