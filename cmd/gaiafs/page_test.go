package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the output of the commands to docs/commands.md and testdata")

const commandsPage = "../../docs/commands.md"

// docs/commands.md has the help text of each command.
func TestCommandsPage(t *testing.T) {
	page := commandsText()
	if *update {
		require.NoError(t, os.WriteFile(commandsPage, []byte(page), 0o644))
	}
	written, err := os.ReadFile(commandsPage)
	require.NoError(t, err)
	require.Empty(t, difference(string(written), page), "regenerate it: go test ./cmd/gaiafs -run TestCommandsPage -update")
}

// difference returns the first line of two texts that differs, with the text around it, or "".
func difference(was, is string) string {
	a, b := strings.Split(was, "\n"), strings.Split(is, "\n")
	for i := range max(len(a), len(b)) {
		part := func(lines []string) string {
			return strings.Join(lines[min(max(i-2, 0), len(lines)):min(i+3, len(lines))], "\n")
		}
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			return fmt.Sprintf("line %d is\n%s\nbut should be\n%s\n", i+1, part(a), part(b))
		}
	}
	return ""
}

func TestDifference(t *testing.T) {
	require.Empty(t, difference("a\nb", "a\nb"))
	require.Equal(t, "line 4 is\nb\nc\nd\ne\nf\nbut should be\nb\nc\nD\ne\nf\n",
		difference("a\nb\nc\nd\ne\nf\ng", "a\nb\nc\nD\ne\nf\nG"))
	require.Equal(t, "line 2 is\na\nbut should be\na\nb\n", difference("a", "a\nb"))
}

// Help has lines that fit the terminal, and no others than the table of a command may be longer.
func TestHelpFits(t *testing.T) {
	const text = "one two three\nfour\n\n  a table keeps its lines\n\nfive six"
	require.Equal(t, "one two three four\n\n  a table keeps its lines\n\nfive six", filled(text, 80))
	require.Equal(t, "one two\nthree four\n\n  a table keeps its lines\n\nfive six", filled(text, 10))
	require.NoError(t, eachCommand(newRoot(), func(c *cobra.Command) error {
		var help strings.Builder
		c.InitDefaultHelpFlag()
		c.SetOut(&help)
		if err := c.Help(); err != nil {
			return err
		}
		for line := range strings.Lines(help.String()) {
			require.LessOrEqual(t, len([]rune(strings.TrimSpace(line))), mostHelp, c.CommandPath())
		}
		return nil
	}))
}

func commandsText() string {
	var b strings.Builder
	b.WriteString(`# Commands

The output of ` + "`gaiafs COMMAND --help`" + ` for each command, made by
` + "`go test ./cmd/gaiafs -run TestCommandsPage -update`" + `. The settings of
a mount are also flags of ` + "`gaiafs mount`" + `: [configuration.md](configuration.md) lists them.
`)
	var add func(*cobra.Command)
	add = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c.HasParent() {
			return
		}
		c.InitDefaultHelpFlag()
		if c.Name() == "mount" {
			for _, name := range settingNames() { // docs/configuration.md lists them
				c.Flags().Lookup(name).Hidden = true
			}
		}
		var help strings.Builder
		c.SetOut(&help)
		_ = c.Help() // into memory
		b.WriteString("\n## " + c.CommandPath() + "\n\n```\n" + strings.TrimRight(help.String(), "\n") + "\n```\n")
		for _, sub := range c.Commands() {
			add(sub)
		}
	}
	root := newRoot()
	add(root)
	return b.String()
}
