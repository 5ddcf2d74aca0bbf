package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// scoring is what the commands that score something on a trace have in common.
type scoring struct {
	asJSON, partial bool
	names           []string
}

// flags adds the flags. things are what is scored, known by these names.
func (s *scoring) flags(cmd *cobra.Command, thing, things string, names []string) {
	cmd.Flags().BoolVar(&s.asJSON, "json", false, "print JSON")
	partialFlag(cmd, &s.partial)
	cmd.Flags().StringSliceVar(&s.names, thing, names, things+" to score")
}

func partialFlag(cmd *cobra.Command, partial *bool) {
	cmd.Flags().BoolVar(partial, "partial", false, "take what can be read of a trace that is cut short or damaged")
}

// read reads the trace. make fails for what there is not of a name.
func (s *scoring) read(cmd *cobra.Command, path string, make func(name string) error) (*trace.Trace, error) {
	for _, name := range s.names {
		if err := make(name); err != nil {
			return nil, usageError{err}
		}
	}
	return readTrace(cmd, path, s.partial)
}

// print prints a document as was asked for.
func (s *scoring) print(cmd *cobra.Command, d interface{ print(w io.Writer) error }) error {
	if s.asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(d)
	}
	return d.print(cmd.OutOrStdout())
}

// nameList says in a line what each of the names is.
func nameList(names []string, about func(string) string) string {
	var list strings.Builder
	table(&list, func(w io.Writer) {
		for _, name := range names {
			fmt.Fprintf(w, "  %s\t%s\n", name, about(name))
		}
	})
	return strings.TrimRight(list.String(), "\n")
}
