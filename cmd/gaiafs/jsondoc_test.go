package main

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// jsonFields returns the fields of a type's JSON document. Fields of nested objects follow a dot.
func jsonFields(of reflect.Type) (fields []string) {
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of.String() == "time.Time" {
		return nil
	}
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			fields = append(fields, jsonFields(f.Type)...)
		case name != "" && name != "-":
			fields = append(fields, name)
			for _, in := range jsonFields(f.Type) {
				fields = append(fields, name+"."+in)
			}
		}
	}
	return fields
}

// writtenFields returns the fields in a description of JSON, in which each field has at least one line. It uses the
// indentation. folded are fields whose objects the description leaves out.
func writtenFields(text string) (fields, folded []string) {
	type open struct {
		indent int
		name   string
	}
	var outer []open
	field := regexp.MustCompile(`^( *)"([a-z_]+)": *(\{ \.\.\. \}|\[ \.\.\. \])?`)
	for line := range strings.Lines(text) {
		m := field.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		for len(outer) > 0 && outer[len(outer)-1].indent >= len(m[1]) {
			outer = outer[:len(outer)-1]
		}
		path := m[2]
		if len(outer) > 0 {
			path = outer[len(outer)-1].name + "." + path
		}
		outer = append(outer, open{len(m[1]), path})
		fields = append(fields, path)
		if m[3] != "" {
			folded = append(folded, path)
		}
	}
	return fields, folded
}

// below reports whether a field is inside one of the objects others.
func below(field string, others []string) bool {
	return slices.ContainsFunc(others, func(o string) bool { return strings.HasPrefix(field, o+".") })
}

// docs/status.md lists each field of the JSON documents, and no others.
func TestJSONIsDocumented(t *testing.T) {
	page := text(t, "docs/status.md")
	blocks := regexp.MustCompile("(?ms)^```\n(.*?)^```$").FindAllStringSubmatch(page, -1)
	require.Len(t, blocks, 2)
	without := func(fields, objects []string) []string {
		return slices.DeleteFunc(slices.Clone(fields), func(f string) bool { return below(f, objects) })
	}
	written, folded := writtenFields(blocks[0][1])
	code := without(jsonFields(reflect.TypeFor[statusDocument]()), folded)
	require.ElementsMatch(t, code, without(written, []string{"memory.classes"})) // a map: its keys are below

	ofFile, _ := writtenFields(blocks[1][1])
	for _, f := range written {
		if f, in := strings.CutPrefix(f, "files."); in {
			ofFile = append(ofFile, f)
		}
	}
	require.ElementsMatch(t, jsonFields(reflect.TypeFor[fileInfo]()), ofFile)

	words := func(page, section string) (all []string) {
		_, after, found := strings.Cut(page, "\n## "+section+"\n")
		require.True(t, found, section)
		after, _, _ = strings.Cut(after, "\n## ")
		for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\|").FindAllStringSubmatch(after, -1) {
			all = append(all, m[1])
		}
		return all
	}
	for section, of := range map[string]reflect.Type{
		"Of all mounts":     reflect.TypeFor[row](),
		"`gaiafs set`":      reflect.TypeFor[settingState](),
		"`gaiafs doctor`":   reflect.TypeFor[check](),
		"Answers to a warm": reflect.TypeFor[warmed](),
		"To a verification": reflect.TypeFor[pagecache.Verification](),
		"To an eviction":    reflect.TypeFor[pagecache.Eviction](),
		"Latencies":         reflect.TypeFor[pagecache.Latency](),
	} {
		require.ElementsMatch(t, jsonFields(of), words(page, section), section)
	}
	require.ElementsMatch(t, jsonFields(reflect.TypeFor[live.Event]()),
		words(text(t, "docs/trace.md"), "What happens now"))

	s := mountForeground(t, "--gpus=emulated:1")
	require.NoError(t, s.useDevice(t, "used").Close())
	now, err := statusOf(s.mountpoint, patience)
	require.NoError(t, err)
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
	_, counters, _ := strings.Cut(page, "\n## Counters\n")
	counters, _, _ = strings.Cut(counters, "\n## ")
	var names []string
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*?`) \\|").FindAllStringSubmatch(counters, -1) {
		for _, m := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			names = append(names, m[1])
		}
	}
	keys := func(m map[string]int64) (all []string) {
		for k := range m {
			all = append(all, k)
		}
		return all
	}
	require.ElementsMatch(t, keys(now.Counters), names)
	for class := range now.Memory.Classes {
		require.Contains(t, written, "memory.classes."+class)
	}
	for name := range now.Latencies {
		require.Contains(t, page, fmt.Sprintf("`%s`", name))
	}
}
