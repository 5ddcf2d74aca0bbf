package main

import (
	"flag"
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
	require.Equal(t, page, string(written), "regenerate it: go test ./cmd/gaiafs -run TestCommandsPage -update")
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
