package ratchet

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const root = "../.."

// notProduct are folders whose lines do not count, including everything below them.
var notProduct = []string{
	"bench", "client/c/ctest", "control/controltest", "gpubackend/conformance", "gpubackend/faulty", "internal/arrows",
	"internal/fakecuda", "internal/hungfs", "internal/locktree", "internal/model", "internal/mounttest",
	"internal/plants", "internal/ratchet", "internal/stress", "internal/testdevice", "internal/testdisk",
	"internal/testmount", "internal/testsummary",
}

// layered are the packages whose files have an order.
var layered = []string{"fs", "pagecache"}

// key is the beginning of a row: what is measured, and of what.
type key struct{ what, of string }

// measureAll returns the figures of the module.
func measureAll() (map[key]int, error) {
	m := make(map[key]int)
	folders, err := foldersOf(root)
	if err != nil {
		return nil, err
	}
	for folder, files := range folders {
		if err := measureFolder(m, folder, files); err != nil {
			return nil, err
		}
	}
	settings, err := countSettings(filepath.Join(root, "cmd/gaiafs/settings.go"))
	if err != nil {
		return nil, err
	}
	m[key{"settings", "mount"}] = settings
	for _, folder := range layered {
		up, all, err := references(folder)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", folder, err)
		}
		m[key{"up", folder}] = len(up)
		if len(up) == 0 || len(all) == 0 {
			return nil, fmt.Errorf("%s: %d of %d references run up, which cannot be true", folder, len(up), len(all))
		}
	}
	return m, nil
}

// foldersOf returns the Go files of the tree that are no tests, by folder.
func foldersOf(top string) (map[string][]string, error) {
	folders := make(map[string][]string)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != top && (strings.HasPrefix(name, ".") || slices.Contains([]string{"build", "shared", "testdata"}, name)) {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			folder, err := filepath.Rel(top, filepath.Dir(path))
			if err != nil {
				return err
			}
			folders[folder] = append(folders[folder], path)
		}
		return nil
	})
	return folders, err
}

// measureFolder adds the lines of a folder and the sizes of its types.
func measureFolder(m map[key]int, folder string, files []string) error {
	lines := 0
	methods := make(map[string]map[string]bool) // the same method may be in two files, with different build tags
	fields := make(map[string]int)
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		lines += bytes.Count(text, []byte("\n"))
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		measureTypes(file, fields, methods)
	}
	for name, n := range fields {
		if len(methods[name]) > recordMethods {
			m[key{"fields", folder + "." + name}] = n
		}
	}
	for name, names := range methods {
		m[key{"methods", folder + "." + name}] = len(names)
	}
	if !slices.ContainsFunc(notProduct, func(f string) bool { return folder == f || strings.HasPrefix(folder, f+"/") }) {
		m[key{"lines", folder}] = lines
		m[total] += lines
	}
	return nil
}

// recordMethods is how many methods a type may have that only keeps data: settings, counters, a status.
const recordMethods = 3

// total is the row of the lines of all packages.
var total = key{"lines", "total"}

// measureTypes adds the fields and methods that a file declares.
func measureTypes(file *ast.File, fields map[string]int, methods map[string]map[string]bool) {
	add := func(typ, method string) {
		if methods[typ] == nil {
			methods[typ] = make(map[string]bool)
		}
		methods[typ][method] = true
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv != nil {
				add(receiver(d.Recv.List[0].Type), d.Name.Name)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				t, is := s.(*ast.TypeSpec)
				if !is {
					continue
				}
				switch body := t.Type.(type) {
				case *ast.StructType:
					fields[t.Name.Name] = body.Fields.NumFields()
				case *ast.InterfaceType:
					for _, f := range body.Methods.List {
						for _, n := range f.Names {
							add(t.Name.Name, n.Name)
						}
					}
				}
			}
		}
	}
}

// receiver returns the name of a method's type.
func receiver(typ ast.Expr) string {
	switch x := typ.(type) {
	case *ast.StarExpr:
		return receiver(x.X)
	case *ast.IndexExpr:
		return receiver(x.X)
	case *ast.IndexListExpr:
		return receiver(x.X)
	case *ast.Ident:
		return x.Name
	}
	return ""
}

// countSettings counts the flags that the method flags of settings makes.
func countSettings(path string) (int, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	names := make(map[string]bool)
	for _, d := range file.Decls {
		f, is := d.(*ast.FuncDecl)
		if !is || f.Name.Name != "flags" {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, is := n.(*ast.CallExpr)
			if !is || len(call.Args) < 2 {
				return true
			}
			sel, is := call.Fun.(*ast.SelectorExpr)
			name, lit := call.Args[1].(*ast.BasicLit)
			if is && lit && (strings.HasSuffix(sel.Sel.Name, "Var") || strings.HasSuffix(sel.Sel.Name, "VarP")) {
				names[name.Value] = true
			}
			return true
		})
	}
	if len(names) == 0 {
		return 0, fmt.Errorf("%s makes no flags", path)
	}
	return len(names), nil
}

// pair is a reference from one file of a package to another.
type pair struct{ from, to string }

func (p pair) String() string { return p.from + " -> " + p.to }

// references returns the references between files of a package, and those that run up.
func references(folder string) (up, all []pair, err error) {
	set := token.NewFileSet()
	names, imports, err := load(folder)
	if err != nil {
		return nil, nil, err
	}
	var files []*ast.File
	for _, name := range names {
		file, err := parser.ParseFile(set, filepath.Join(root, folder, name), nil,
			parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			return nil, nil, err
		}
		files = append(files, file)
	}
	order, err := orderOf(files, names)
	if err != nil {
		return nil, nil, err
	}
	all, err = pairsOf(set, files, imports)
	for _, p := range all {
		if order[p.from] < order[p.to] {
			up = append(up, p)
		}
	}
	return up, all, err
}

// load returns the files of a package, and an importer of what it imports.
func load(folder string) (files []string, imports types.Importer, err error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-f",
		"{{.ImportPath}}\t{{.Export}}\t{{range .GoFiles}}{{.}} {{end}}", "./"+folder)
	cmd.Dir = root
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %s", err, errs.String())
	}
	exports := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		columns := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		exports[columns[0]] = columns[1]
		files = strings.Fields(columns[2]) // the package itself comes last
	}
	return files, importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	}), nil
}

// pairsOf checks the types of a package, and returns the references between its files.
func pairsOf(set *token.FileSet, files []*ast.File, imports types.Importer) ([]pair, error) {
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object)}
	conf := types.Config{Importer: imports}
	pkg, err := conf.Check("p", set, files, info)
	if err != nil {
		return nil, err
	}
	seen := make(map[pair]bool)
	for id, o := range info.Uses {
		p := pair{filepath.Base(set.Position(id.Pos()).Filename), filepath.Base(set.Position(o.Pos()).Filename)}
		if o.Pkg() == pkg && p.from != p.to {
			seen[p] = true
		}
	}
	var all []pair
	for p := range seen {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b pair) int { return strings.Compare(a.String(), b.String()) })
	return all, nil
}

// heading begins the part of a package comment that has the order of the files.
const heading = "# Files, from bottom to top\n"

// orderOf reads the order of the files from the package comment: indented lines with names without .go, after an
// optional title that ends in a colon.
func orderOf(files []*ast.File, names []string) (map[string]int, error) {
	order := make(map[string]int)
	for _, f := range files {
		_, text, is := strings.Cut(f.Doc.Text(), heading)
		if !is {
			continue
		}
		text, _, _ = strings.Cut(text, "\n# ")
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, "\t") {
				continue
			}
			if _, after, titled := strings.Cut(line, ":"); titled {
				line = after
			}
			for _, name := range strings.Fields(line) {
				if _, twice := order[name+".go"]; twice {
					return nil, fmt.Errorf("doc.go names %s twice", strconv.Quote(name))
				}
				order[name+".go"] = len(order)
			}
		}
	}
	var missing []string
	for _, name := range names {
		if _, has := order[name]; !has && name != "doc.go" {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%s has no place in the order of doc.go: %q", strings.Join(missing, ", "),
			strings.TrimSpace(heading))
	}
	for name := range order {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("doc.go has a place for %s, which is not there", name)
		}
	}
	return order, nil
}
