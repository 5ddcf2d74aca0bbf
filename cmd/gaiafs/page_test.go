package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write what the commands say into docs/commands.md and testdata")

const commandsPage = "../../docs/commands.md"

// docs/commands.md has what each command says of itself.
func TestCommandsPage(t *testing.T) {
	page := commandsText()
	if *update {
		require.NoError(t, os.WriteFile(commandsPage, []byte(page), 0o644))
	}
	written, err := os.ReadFile(commandsPage)
	require.NoError(t, err)
	require.Equal(t, page, string(written), "write it again: go test ./cmd/gaiafs -run TestCommandsPage -update")
}

func commandsText() string {
	var b strings.Builder
	b.WriteString(`# Commands

What ` + "`gaiafs COMMAND --help`" + ` says. This page is made of it:
` + "`go test ./cmd/gaiafs -run TestCommandsPage -update`" + `. The settings of
a mount are flags of ` + "`gaiafs mount`" + `, too: [configuration.md](configuration.md) has them.
`)
	var add func(*cobra.Command)
	add = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c.HasParent() {
			return
		}
		c.InitDefaultHelpFlag()
		if c.Name() == "mount" {
			for _, name := range settingNames() { // docs/configuration.md has them
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
