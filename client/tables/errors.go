package main

import (
	"fmt"
	"strings"
)

func errorsInC(rows []row) string {
	var b strings.Builder
	b.WriteString(header("cuda_errors.txt", "/*", " */") + "static int errno_of(result r)\n{\n\tswitch (r) {\n")
	for i, r := range rows {
		code, name, errno := r[0], r[1], r[2]
		fmt.Fprintf(&b, "\tcase %s: /* %s */\n", code, name)
		if i+1 == len(rows) || rows[i+1][2] != errno {
			fmt.Fprintf(&b, "\t\treturn %s;\n", errno)
		}
	}
	b.WriteString("\tdefault:\n\t\treturn EIO;\n\t}\n}\n")
	return b.String()
}

func errorsInGo(rows []row) string {
	var b strings.Builder
	b.WriteString("import \"syscall\"\n\n")
	b.WriteString("// cudaErrno has the errno for a result of libcuda. For results that it lacks, that is EIO.\n")
	b.WriteString("var cudaErrno = map[cudaResult]syscall.Errno{\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "\t%s: syscall.%s, // %s\n", r[0], r[2], r[1])
	}
	b.WriteString("}\n")
	return inGo("cuda_errors.txt", "gaiafs", b.String())
}
