package pagecache

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// processName returns the name of a process for messages, or "" if it is not known.
func processName(process uint32) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", process))
	if err != nil {
		return ""
	}
	return Printable(strings.TrimSuffix(string(name), "\n"))
}

// Printable returns a name that others chose, of a file or a process, so that it is safe to print. It quotes and
// escapes the name if a terminal would take part of it for a command or for the end of the line.
func Printable(name string) string {
	if utf8.ValidString(name) && strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return name
	}
	return strconv.Quote(name)
}
