package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// What a check came to.
const (
	checkOK   = "ok"
	checkWarn = "warn" // gaiafs works, though not as well as it could
	checkFail = "fail" // it does not
)

// check is what doctor found out about one thing.
type check struct {
	Name  string `json:"name"`
	State string `json:"state"`
	Text  string `json:"text"`
	// Cure says what to do; empty where there is nothing to do.
	Cure string `json:"cure,omitempty"`
}

func newDoctor() *cobra.Command {
	var asJSON bool
	var dir string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say whether gaiafs can work on this machine, and what to do where it cannot",
		Long: `doctor looks at the kernel, FUSE, limits, memory, the NVIDIA driver and its GPUs, the links to and between them, the disk,
containers, and the mounts there are. Each line says ok, warn or fail, and what helps. Speeds are measured for a second each:
they are rough. The exit code is 1 where something fails; a warning is no failure.`,
		Example: `  gaiafs doctor
  gaiafs doctor --dir /data      # the disk that is to be mounted
  gaiafs doctor --json | jq '.[] | select(.state != "ok")'`,
		Args:              arguments(),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var all []check
			for _, look := range []func() []check{checkKernel, checkFUSE, checkLimits, checkMemory, checkContainer,
				checkGPUs, func() []check { return checkDisk(dir) }, checkMounts} {
				for _, c := range look() {
					all = append(all, c)
					if !asJSON {
						c.print(cmd.OutOrStdout())
					}
				}
			}
			if asJSON {
				if err := printJSON(cmd, all); err != nil {
					return err
				}
			}
			return verdict(all)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: an array of objects with name, state, text and cure")
	cmd.Flags().StringVar(&dir, "dir", os.TempDir(),
		"measure the disk of the folder `DIR` (default: that of temporary files)")
	cmd.Flags().Lookup("dir").DefValue = ""
	if err := cmd.MarkFlagDirname("dir"); err != nil {
		panic(err) // the flag is not named as above
	}
	return cmd
}

func (c check) print(w io.Writer) {
	fmt.Fprintf(w, "%-4s  %-10s  %s\n", c.State, c.Name, c.Text)
	if c.Cure != "" {
		fmt.Fprintf(w, "%-4s  %-10s  → %s\n", "", "", c.Cure)
	}
}

// verdict is an error where something fails.
func verdict(all []check) error {
	var failed []string
	for _, c := range all {
		if c.State == checkFail {
			failed = append(failed, c.Name)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("gaiafs cannot work as it should here: see %s", strings.Join(failed, ", "))
}
