package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// scoring is the common part of the commands that score something on a trace.
type scoring struct {
	asJSON, partial bool
	names           []string
}

// flags adds the flags. things is what is scored; names are the possible values.
func (s *scoring) flags(cmd *cobra.Command, thing, things string, names []string) {
	cmd.Flags().BoolVar(&s.asJSON, "json", false, "print JSON")
	partialFlag(cmd, &s.partial)
	cmd.Flags().StringSliceVar(&s.names, thing, names, "the `"+strings.ToUpper(things)+"` to score, such as "+names[0]+","+names[1])
}

func partialFlag(cmd *cobra.Command, partial *bool) {
	cmd.Flags().BoolVar(partial, "partial", false, "use the readable part of a trace that is truncated or damaged")
}

// read reads the trace. make returns an error for a name that does not exist.
func (s *scoring) read(cmd *cobra.Command, path string, make func(name string) error) (*trace.Trace, error) {
	for _, name := range s.names {
		if err := make(name); err != nil {
			return nil, usageError{err}
		}
	}
	return readTrace(cmd, path, s.partial)
}

// print prints a document as JSON or as text.
func (s *scoring) print(cmd *cobra.Command, d interface{ print(w io.Writer) error }) error {
	if s.asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(d)
	}
	return d.print(cmd.OutOrStdout())
}

// nameList returns a table with a line about each name.
func nameList(names []string, about func(string) string) string {
	var list strings.Builder
	table(&list, func(w io.Writer) {
		for _, name := range names {
			fmt.Fprintf(w, "  %s\t%s\n", name, about(name))
		}
	})
	return strings.TrimRight(list.String(), "\n")
}
