package main

import (
	"fmt"
	"strings"
)

// The columns of a row of kinds.txt.
func numberOf(r row) string { return r[0] }
func nameOf(r row) string   { return r[1] }
func goNameOf(r row) string { return r[2] }
func aboutOf(r row) string  { return r[3] }

// constants returns Go code: the kinds as constants, and their String method, in the order of the table.
func constants(rows []row) string {
	var b strings.Builder
	b.WriteString("const (\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "// Kind%[1]s is %[2]s.\nKind%[1]s Kind = %[3]s\n", goNameOf(r), aboutOf(r), numberOf(r))
	}
	b.WriteString(")\n\n")
	b.WriteString("func (k Kind) String() string {\nswitch k {\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "case Kind%s:\nreturn %q\n", goNameOf(r), nameOf(r))
	}
	b.WriteString("}\nreturn \"unknown\"\n}\n")
	return b.String()
}

// kindsOfDaemon returns gpubackend/kinds.go: the daemon knows nothing else about kinds.
func kindsOfDaemon(rows []row) string { return inGo("kinds.txt", "gpubackend", constants(rows)) }

// each returns a list with an element for each kind, by a pattern with the kind's name.
func each(rows []row, pattern string) string {
	var b strings.Builder
	for _, r := range rows {
		b.WriteString(strings.ReplaceAll(pattern, "NAME", nameOf(r)))
	}
	return b.String()
}

// kindsOfCommand returns the list of backends. Each kind has its own in a file of cmd/gaiafs.
func kindsOfCommand(rows []row) string {
	return inGo("kinds.txt", "main",
		"// gpuBackends are the ways to get devices, in the order in which auto tries them.\n"+
			"var gpuBackends = []*gpuBackend{"+each(rows, "&NAMEBackend,")+"}\n")
}

// kindsInGo returns the kinds of the Go client. Each kind has a file of its own there that maps memory.
func kindsInGo(rows []row) string {
	return inGo("kinds.txt", "gaiafs", constants(rows)+
		"\n// kinds lists the kinds in order of preference.\n"+
		"var kinds = []*deviceKind{"+each(rows, "&NAMEKind,")+"}\n")
}

func kindsInC(rows []row) string {
	var b strings.Builder
	b.WriteString(header("kinds.txt", "/*", " */"))
	b.WriteString("enum {\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "\t/* %s */\n\tGAIAFS_KIND_%s = %s,\n", aboutOf(r), strings.ToUpper(nameOf(r)), numberOf(r))
	}
	b.WriteString("};\n\n")
	b.WriteString("/* A row for each kind, in order of preference. */\n#define GAIAFS_KINDS(row)")
	for _, r := range rows {
		fmt.Fprintf(&b, " row(%s, %s)", nameOf(r), strings.ToUpper(nameOf(r)))
	}
	b.WriteString("\n")
	return b.String()
}

func kindsInPython(rows []row) string {
	var b strings.Builder
	b.WriteString(header("kinds.txt", "#", ""))
	b.WriteString("\"\"\"The kinds of devices.\"\"\"\n\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "%s = %s\n", strings.ToUpper(nameOf(r)), numberOf(r))
	}
	b.WriteString("\n# By the names in status and in devices such as \"cuda:0\".\nNUMBERS = {")
	for i, r := range rows {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%q: %s", nameOf(r), strings.ToUpper(nameOf(r)))
	}
	b.WriteString("}\n")
	return b.String()
}
