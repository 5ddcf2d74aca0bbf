package main

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"
)

// version is set by the build: go build -ldflags "-X main.version=…".
var version = "dev"

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:               "version",
		Short:             "Print the version, and which devices can be used",
		Example:           "  gaiafs version",
		Args:              arguments(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return printVersion(cmd.OutOrStdout()) },
	}
}

func printVersion(out io.Writer) error {
	_, err := fmt.Fprintf(out, "gaiafs %s (%s, %s/%s)\nemulated devices: up to %d\nCUDA devices: %s\n",
		version, runtime.Version(), runtime.GOOS, runtime.GOARCH, maxEmulated, cudaSummary())
	return err
}
