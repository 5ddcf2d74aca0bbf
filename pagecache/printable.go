package pagecache

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable returns a name that others chose, of a file or of a process, as a line of text for people can show it: as
// it is, or quoted with escapes if a terminal would take some of it for a command or for the end of the line.
func Printable(name string) string {
	if utf8.ValidString(name) && strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return name
	}
	return strconv.Quote(name)
}
