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

// optionsSection matches the section of the options as cobra writes it: with [=false] behind each switch, and without
// the names of values.
var optionsSection = regexp.MustCompile(`(?s)\.SH OPTIONS\n.*?(\n\.SH |$)`)

// optionLine matches a line of pflag.FlagSet.FlagUsages: -r, --recursive NAME   text.
var optionLine = regexp.MustCompile(`^ +(?:(-\w), )?(--[\w-]+)(?: (\S+))? {2,}(.*)$`)

// optionsManual returns the section of a command's options: what its --help says of them.
func optionsManual(c *cobra.Command) string {
	escaped := strings.NewReplacer(`\`, `\e`, "-", `\-`)
	var b strings.Builder
	b.WriteString(".SH OPTIONS\n")
	for line := range strings.Lines(c.NonInheritedFlags().FlagUsages()) {
		m := optionLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		for i, part := range m {
			m[i] = escaped.Replace(part)
		}
		b.WriteString(".TP\n")
		if m[1] != "" {
			b.WriteString(`\fB` + m[1] + `\fP, `)
		}
		b.WriteString(`\fB` + m[2] + `\fP`)
		if m[3] != "" {
			b.WriteString(` \fI` + m[3] + `\fP`)
		}
		b.WriteString("\n\\&" + m[4] + "\n") // \& in case it begins with a dot
	}
	return b.String()
}

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
		text := optionsSection.ReplaceAllStringFunc(page.String(), func(section string) string {
			return strings.TrimRight(optionsManual(c), "\n") + optionsSection.FindStringSubmatch(section)[1]
		})
		// A page has no date, so that each build makes the same.
		_, err = io.WriteString(to, strings.Replace(text, epoch.Format(`"Jan 2006"`), `""`, 1))
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
