package ratchet

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Tests of the test.

func TestRowsAreLimits(t *testing.T) {
	methods, up, pkg := key{"methods", "p.T"}, key{"up", "p"}, key{"lines", "p"}
	table := map[key]row{methods: {100, 90}, up: {10, 0}, pkg: {1000, 0}, total: {5000, 0}}
	at := func(m, u, l, all int) map[key]int {
		return map[key]int{methods: m, up: u, pkg: l, total: all, {"fields", "p.T"}: smallFields}
	}
	require.Empty(t, compare(table, at(100, 10, 1000, 5000)))
	require.Empty(t, compare(table, at(98, 9, 801, 4000)))
	require.Equal(t, []string{"p.T has 101 methods, the table allows 100: give the new work a type of its own"},
		compare(table, at(101, 10, 1000, 5000)))
	require.Equal(t, []string{"methods of p.T: only 97, the table allows 100. " + tighten},
		compare(table, at(97, 10, 1000, 5000)))
	require.Len(t, compare(table, at(100, 11, 1000, 5000)), 1)
	require.Len(t, compare(table, at(100, 8, 1000, 5000)), 1)
	require.Len(t, compare(table, at(100, 10, 1201, 5000)), 1, "lines of a package")
	require.Len(t, compare(table, at(100, 10, 1000, 5001)), 1, "lines in total")
	require.Len(t, compare(table, at(100, 10, 1000, 2999)), 1)
	require.Len(t, compare(table, at(smallMethods, 10, 1000, 5000)), 1, "a row that is not needed")

	grown := at(100, 10, 1000, 5000)
	grown[key{"fields", "p.T"}]++
	require.Equal(t, []string{"p.T has 21 fields, the table allows 20: give the new work a type of its own"},
		compare(table, grown))
	grown = at(100, 10, 1000, 5000)
	grown[key{"lines", "q"}] = 1
	require.Equal(t, []string{"the table has no row for q. " + tighten}, compare(table, grown))
	delete(grown, up)
	require.Len(t, compare(table, grown), 2, "a row for something that is not there")
}

func TestUpdateOnlyLowers(t *testing.T) {
	methods, fields, pkg := key{"methods", "p.T"}, key{"fields", "p.T"}, key{"lines", "p"}
	table := map[key]row{methods: {100, 90}, fields: {30, 25}, pkg: {1000, 0}, total: {5000, 4000}}
	lowered, refused := lower(table, map[key]int{methods: 60, fields: 20, pkg: 1260, total: 2801, {"lines", "q"}: 70})
	require.Empty(t, refused)
	require.Equal(t, map[key]row{methods: {60, 90}, pkg: {1300, 0}, total: {3000, 4000}, {"lines", "q"}: {100, 0}},
		lowered)

	lowered, refused = lower(table, map[key]int{methods: 101, fields: 31, {"fields", "p.U"}: 21, pkg: 1000, total: 5001})
	require.Len(t, refused, 4)
	require.Equal(t, table, lowered)
}

func TestTableSurvivesWriting(t *testing.T) {
	table, err := readTable(tablePath)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "table.txt")
	require.NoError(t, writeTable(path, table))
	again, err := readTable(path)
	require.NoError(t, err)
	require.Equal(t, table, again)
}

// sample returns parsed files.
func sample(t *testing.T, set *token.FileSet, texts map[string]string) (files []*ast.File, names []string) {
	for name, text := range texts {
		file, err := parser.ParseFile(set, name, text, parser.ParseComments)
		require.NoError(t, err)
		files, names = append(files, file), append(names, name)
	}
	return files, names
}

func TestTypesAreMeasured(t *testing.T) {
	files, _ := sample(t, token.NewFileSet(), map[string]string{"a.go": `package p
type S[K any] struct { a, b int; c string; fmt.Stringer; in struct{ d, e int } }
func (s *S[K]) One() {}
func (s S[K]) Two() {}
func three() {}
type I interface { Four(); Five(); fmt.Stringer }`})
	fields, methods := make(map[string]int), make(map[string]map[string]bool)
	measureTypes(files[0], fields, methods)
	require.Equal(t, map[string]int{"S": 5}, fields)
	require.Equal(t, map[string]map[string]bool{"S": {"One": true, "Two": true}, "I": {"Four": true, "Five": true}},
		methods)
}

func TestReferencesAreFound(t *testing.T) {
	set := token.NewFileSet()
	files, names := sample(t, set, map[string]string{
		"doc.go": "// Package p is a sample.\n//\n// # Files, from bottom to top\n//\n// Text: none.\n//\n" +
			"//\tlow:   a\n//\thigh: b c\n//\n// # More\n//\n//\td\npackage p",
		"a.go": "package p\ntype A struct { n int }\nfunc (a *A) M() { b() }",
		"b.go": "package p\nfunc b() {}\nfunc (a *A) N() { a.n++ }",
		"c.go": "package p\nvar c = new(A).n\n",
	})
	pairs, err := pairsOf(set, files, importer.Default())
	require.NoError(t, err)
	require.Equal(t, []pair{{"a.go", "b.go"}, {"b.go", "a.go"}, {"c.go", "a.go"}}, pairs)
	order, err := orderOf(files, names)
	require.NoError(t, err)
	require.Equal(t, map[string]int{"a.go": 0, "b.go": 1, "c.go": 2}, order)
	_, err = orderOf(files, append(names, "new.go"))
	require.ErrorContains(t, err, "new.go has no place")
	_, err = orderOf(files, names[:0])
	require.ErrorContains(t, err, "which is not there")
}
