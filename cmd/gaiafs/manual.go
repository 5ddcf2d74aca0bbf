package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newManual makes a hidden command for packagers. The manual pages contain the text of --help.
func newManual() *cobra.Command {
	return &cobra.Command{
		Use:               "manual DIRECTORY",
		Short:             "Write the manual pages of all commands",
		Example:           "  gaiafs manual /tmp/man1",
		Args:              arguments("DIRECTORY"),
		Hidden:            true,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachCommand(cmd.Root(), func(c *cobra.Command) error {
				f, err := os.Create(filepath.Join(args[0], strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"))
				if err != nil {
					return err
				}
				defer f.Close()
				if err := writeManual(c, f); err != nil {
					return err
				}
				return f.Close()
			})
		},
	}
}

// eachCommand calls fn for a command and for all commands below it that --help shows.
func eachCommand(c *cobra.Command, fn func(*cobra.Command) error) error {
	if err := fn(c); err != nil {
		return err
	}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "completion" && sub.Name() != "help" {
			if err := eachCommand(sub, fn); err != nil {
				return err
			}
		}
	}
	return nil
}

// options matches the options of a page as cobra writes them. In that form an option and its description share a line.
var options = regexp.MustCompile(`(?m)^(?:\.PP\n)?(\\fB-.*)\n\t`)

// writeManual writes the page of one command.
func writeManual(c *cobra.Command, to io.Writer) error {
	c.DisableAutoGenTag = true // it contains the date
	c.InitDefaultHelpFlag()
	long := c.Long
	if long == "" {
		long = c.Short + "."
	}
	if c.HasParent() {
		long += "\n\ngaiafs(1) lists the other commands."
	} else {
		long += "\n\nEach command has its own page, such as gaiafs-mount(1), which lists the settings. mount.fuse.gaiafs(8) " +
			"describes entries of /etc/fstab."
	}
	defer func(before string) { c.Long = before }(c.Long)
	c.Long = escapeMarkdown(long)
	epoch := time.Unix(0, 0).UTC()
	var page strings.Builder
	err := doc.GenMan(c, &doc.GenManHeader{
		Title: strings.ToUpper(strings.ReplaceAll(c.CommandPath(), " ", "-")), Section: "1", Date: &epoch,
		Source: "gaiafs " + version, Manual: "gaiafs",
	}, &page)
	if err == nil {
		_, err = io.WriteString(to, options.ReplaceAllString(page.String(), ".TP\n$1\n"))
	}
	if err != nil {
		return fmt.Errorf("the page of %s cannot be written: %w", c.CommandPath(), err)
	}
	return nil
}

// escapeMarkdown escapes characters of a command's text that would be markup.
func escapeMarkdown(text string) string {
	return strings.NewReplacer("_", `\_`, "*", `\*`, "<", `\<`, "~", `\~`, "`", "\\`").Replace(text)
}
