package main

import (
	"fmt"
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
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "gaiafs %s (%s, %s/%s)\nemulated devices: up to %d\nCUDA devices: %s\n",
				version, runtime.Version(), runtime.GOOS, runtime.GOARCH, maxEmulated, cudaSummary())
			return err
		},
	}
}
