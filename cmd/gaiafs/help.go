package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// Help has lines of at least leastHelp columns, and of at most mostHelp also if the terminal is wider or unknown.
const leastHelp, mostHelp = 60, 120

// printHelp prints the help of a command. Its lines fit the terminal.
func printHelp(cmd *cobra.Command, _ []string) {
	width := helpWidth(beneath(cmd.OutOrStdout()))
	text := cmd.Long
	if text == "" {
		text = cmd.Short
	}
	flags := cmd.LocalFlags()
	usage := strings.Replace(cmd.UsageString(), flags.FlagUsages(), flags.FlagUsagesWrapped(width), 1)
	fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n%s", filled(text, width), usage)
}

// helpWidth returns the width of help on out.
func helpWidth(out io.Writer) int {
	if f, ok := out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return min(max(int(size.Col), leastHelp), mostHelp)
		}
	}
	return mostHelp
}

// filled breaks the paragraphs of a text into lines of at most width columns. Lines that begin with a blank stay as
// they are: they are tables.
func filled(text string, width int) string {
	var b strings.Builder
	column := 0 // where the next word comes; 0 if it begins a line
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		if line == "" || line[0] == ' ' {
			if column > 0 {
				b.WriteString("\n")
			}
			b.WriteString(line + "\n")
			column = 0
			continue
		}
		for word := range strings.FieldsSeq(line) {
			n := utf8.RuneCountInString(word)
			switch {
			case column > 0 && column+1+n > width:
				b.WriteString("\n")
				column = 0
			case column > 0:
				b.WriteString(" ")
				column++
			}
			b.WriteString(word)
			column += n
		}
	}
	return strings.TrimRight(b.String(), "\n")
}
