package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// Results of a check.
const (
	checkOK   = "ok"
	checkWarn = "warn" // gaiafs works, but not as well as it could
	checkFail = "fail" // gaiafs does not work
)

// check is one finding of doctor.
type check struct {
	Name  string `json:"name"`
	State string `json:"state"`
	Text  string `json:"text"`
	// Cure says what to do. It is empty if nothing needs to be done.
	Cure string `json:"cure,omitempty"`
}

func newDoctor() *cobra.Command {
	var asJSON bool
	var dir string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say whether gaiafs can work on this machine, and what to do if it cannot",
		Long: `doctor checks the kernel, FUSE, limits, memory, the NVIDIA driver and its GPUs, the links to and between them, the disk,
containers, and existing mounts. Each line says ok, warn or fail, and what helps. Each speed is measured for about a second
and is rough. The exit code is 1 if something fails; warnings do not count.`,
		Example: `  gaiafs doctor
  gaiafs doctor --dir /data      # the disk of your SOURCE
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
		"measure the disk of the folder `DIR` (default: the folder for temporary files)")
	cmd.Flags().Lookup("dir").DefValue = ""
	if err := cmd.MarkFlagDirname("dir"); err != nil {
		panic(err) // the flag's name is wrong
	}
	return cmd
}

func (c check) print(w io.Writer) {
	fmt.Fprintf(w, "%-4s  %-10s  %s\n", c.State, c.Name, c.Text)
	if c.Cure != "" {
		fmt.Fprintf(w, "%-4s  %-10s  → %s\n", "", "", c.Cure)
	}
}

// verdict returns an error if a check failed.
func verdict(all []check) error {
	var failed []string
	for _, c := range all {
		if c.State == checkFail && !slices.Contains(failed, c.Name) {
			failed = append(failed, c.Name)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("gaiafs cannot work as it should here: see %s", strings.Join(failed, ", "))
}
