package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"

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
	nameProcess()
	run := func(args []string) int { return run(args, os.Stdin, os.Stdout, os.Stderr) }
	tell := func(text string) { fmt.Fprintln(os.Stderr, text) }
	switch {
	case isHelper(os.Args[0]):
		os.Exit(runHelper(&os.Args, run, tell))
	case isUnmountHelper(os.Args[0]):
		os.Exit(runUnmountHelper(os.Args, run, tell))
	}
	os.Exit(run(os.Args[1:]))
}

// nameProcess sets the name that ps and top show, if the process was started through /proc/self/exe: the kernel calls
// it exe. Threads that the main thread starts later inherit it.
func nameProcess() {
	const comm = "/proc/self/comm" // proc_pid_comm(5)
	if name, err := os.ReadFile(comm); err == nil && strings.TrimSpace(string(name)) == "exe" {
		_ = os.WriteFile(comm, []byte("gaiafs"), 0) // if this fails, only the name is ugly
	}
}

// usageError is an error in the command line, the environment or a configuration file.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// loggedError is an error that is already on standard error, as the last line of the log.
type loggedError struct{ error }

func (e loggedError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// sink is standard output. It keeps the first error of a write, because commands do not check most of their prints.
type sink struct {
	io.Writer
	failed error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.Writer.Write(p)
	s.failed = cmp.Or(s.failed, err)
	return n, err
}

// beneath returns standard output itself, for callers that check what it is or ignore its errors.
func beneath(out io.Writer) io.Writer {
	if s, ok := out.(*sink); ok {
		return s.Writer
	}
	return out
}

// run executes a command line and returns the exit code.
func run(args []string, in io.Reader, out, errs io.Writer) int {
	root := newRoot()
	refuseShells(root)
	root.SetArgs(args)
	root.SetIn(in)
	said := &sink{Writer: out}
	root.SetOut(said)
	root.SetErr(errs)
	command, err := root.ExecuteC()
	if err == nil && said.failed != nil {
		err = fmt.Errorf("standard output: %w", said.failed)
	}
	if err == nil {
		return exitOK
	}
	var logged loggedError
	if errors.As(err, &logged) {
		return exitFailure
	}
	text := strings.TrimPrefix(err.Error(), "gaiafs: ") // errors of the client library begin like this
	fmt.Fprintf(errs, "gaiafs: %s\n", withoutControls(text))
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintf(errs, "Try '%s --help'.\n", command.CommandPath())
		return exitUsage
	}
	return exitFailure
}

// refuseShells makes cobra's completion command fail for a shell that it does not know, where it would print its help.
// PowerShell is left out: no package installs completions for it.
func refuseShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		for _, shell := range slices.Clone(c.Commands()) {
			if shell.Name() == "powershell" {
				c.RemoveCommand(shell)
			}
		}
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return noCommand(cmd, args[0])
			}
			return cmd.Help()
		}
	}
}

// withoutControls escapes control characters, which a terminal would obey: the system's errors contain file names
// unchanged.
func withoutControls(text string) string {
	var b strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) || r == '\n' || r == '\t' {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

func newRoot() *cobra.Command {
	var asksVersion bool
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
			switch {
			case len(args) > 0:
				return noCommand(cmd, args[0])
			case asksVersion:
				return printVersion(cmd.OutOrStdout())
			}
			return cmd.Help()
		},
	}
	root.Flags().BoolVar(&asksVersion, "version", false, "print the version, as 'gaiafs version' does")
	root.SetHelpCommand(newHelp())
	root.SetHelpFunc(printHelp)
	root.SuggestionsMinimumDistance = 2
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newMount(), newUmount(), newStatus(), newInfo(), newWarm(), newEvict(), newPin(), newUnpin(),
		newSet(),
		newDoctor(), newProfile(), newTune(),
		newDebug(), newTop(), newTrace(), newDemo(), newProgram(), newBench(), newBenchProcess(), newVersion(),
		newManual())
	completeChoices(root)
	for _, c := range root.Commands() {
		refuseEmpty(c)
	}
	return root
}

// noCommand returns the error for a name that is no command of parent.
func noCommand(parent *cobra.Command, name string) error {
	full := name
	if parent.HasParent() {
		full = commandName(parent) + " " + name
	}
	text := fmt.Sprintf("there is no command %q", full)
	near := slices.DeleteFunc(parent.SuggestionsFor(name), func(known string) bool {
		// Short words are near everything.
		return len(name) < 4 && !strings.HasPrefix(known, name[:min(1, len(name))])
	})
	if len(near) > 0 {
		text += fmt.Sprintf("; did you mean %s?", strings.Join(near, " or "))
	}
	return usagef("%s", text)
}

// commandName returns the name of a command without that of the program, which begins each error.
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

// newHelp replaces cobra's help command, which accepts commands that do not exist.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Help about any command",
		Long:    "help prints what 'gaiafs COMMAND --help' does.",
		Example: "  gaiafs help mount\n  gaiafs help trace record",
		RunE: func(cmd *cobra.Command, args []string) error {
			of, rest, err := cmd.Root().Find(args)
			if err != nil {
				return usageError{err}
			}
			if len(rest) > 0 {
				return noCommand(of, rest[0])
			}
			of.InitDefaultHelpFlag() // as if the command were run
			return of.Help()
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begin string) (names []string,
			_ cobra.ShellCompDirective) {
			if of, rest, err := cmd.Root().Find(args); err == nil && len(rest) == 0 {
				for _, c := range of.Commands() {
					if c.IsAvailableCommand() && strings.HasPrefix(c.Name(), begin) {
						names = append(names, c.Name()+"\t"+c.Short)
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// arguments checks that a command has exactly these arguments.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names) {
			return nil
		}
		if len(names) == 0 {
			return usagef("%s takes no arguments; %s given", commandName(cmd), were(len(args)))
		}
		return usagef("%s needs %s; %s given", commandName(cmd), strings.Join(names, " and "), were(len(args)))
	}
}

// refuseEmpty makes all commands refuse an empty argument. As a path it would name the working directory, and scripts
// pass one if a variable is not set.
func refuseEmpty(c *cobra.Command) {
	for _, sub := range c.Commands() {
		refuseEmpty(sub)
	}
	check := c.Args
	if check == nil || c.Hidden || strings.Contains(c.Use, "COMMAND") { // a command may take empty arguments
		return
	}
	c.Args = func(cmd *cobra.Command, args []string) error {
		if slices.Contains(args, "") {
			return usagef("%s: an argument is empty", commandName(cmd))
		}
		return check(cmd, args)
	}
}

// were begins a sentence about a number of arguments.
func were(arguments int) string {
	if arguments == 1 {
		return "1 argument was"
	}
	return fmt.Sprintf("%d arguments were", arguments)
}
