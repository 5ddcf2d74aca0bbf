package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/fs"
)

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	fs.Guard()
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// usageError is a mistake in the command line, the environment or a configuration file.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// run executes a command line and returns the exit code.
func run(args []string, in io.Reader, out, errs io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errs)
	command, err := root.ExecuteC()
	if err == nil {
		return exitOK
	}
	fmt.Fprintf(errs, "gaiafs: %s\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintf(errs, "Try '%s --help'.\n", command.CommandPath())
		return exitUsage
	}
	return exitFailure
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "gaiafs",
		Short: "A filesystem whose page cache spans the host and the GPUs of a machine",
		Long: `gaiafs shows the files of a directory at a mountpoint. Programs on the CPU use them as usual; programs on a GPU map
them with a helper library. Both may write the same file at the same time, even the same page.

Exit codes: 0 done, 1 failed, 2 wrong usage.`,
		Example: `  gaiafs mount --daemon ~/data /mnt/data    # show ~/data at /mnt/data
  gaiafs status /mnt/data                   # what is where
  gaiafs umount /mnt/data                   # write everything back and end
  gaiafs demo                               # see it work on real pictures
  gaiafs bench --quick --html report.html   # compare it on this machine`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			text := fmt.Sprintf("there is no command %q", args[0])
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				text += fmt.Sprintf("; did you mean %s?", strings.Join(near, " or "))
			}
			return usagef("%s", text)
		},
	}
	root.SuggestionsMinimumDistance = 2
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newMount(), newUmount(), newStatus(), newTrace(), newDemo(), newProgram(), newBench(), newBenchProcess(), newVersion())
	return root
}

// arguments checks that a command has exactly those arguments.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names) {
			return nil
		}
		if len(names) == 0 {
			return usagef("%s takes no arguments, %d were given", cmd.CommandPath(), len(args))
		}
		return usagef("%s needs %s; %d arguments were given", cmd.CommandPath(), strings.Join(names, " and "), len(args))
	}
}
