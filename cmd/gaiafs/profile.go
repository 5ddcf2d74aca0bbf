package main

import (
	"context"
	"errors"
	"os/signal"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// profileKinds are the values of --kind.
var profileKinds = map[string]uint32{"cpu": gaiafs.ProfileCPU, "heap": gaiafs.ProfileHeap,
	"goroutines": gaiafs.ProfileGoroutines, "stacks": gaiafs.ProfileStacks}

func newProfile() *cobra.Command {
	kind := choice{"cpu", []string{"cpu", "heap", "goroutines", "stacks"}}
	length := span{Duration: 10 * time.Second, min: 100 * time.Millisecond}
	var output string
	cmd := &cobra.Command{
		Use:   "profile MOUNTPOINT -o FILE",
		Short: "Make a profile of the daemon, for go tool pprof",
		Long: `profile records what a mount's daemon does: where its time goes (cpu), what its heap holds (heap), what its goroutines do
(goroutines), or their stacks as text (stacks). Only root and the user who mounted may do that. A profile contains names of
functions of gaiafs, and nothing about files.`,
		Example: `  gaiafs profile /mnt/data -o cpu.pprof --for 30s && go tool pprof -top cpu.pprof
  gaiafs profile /mnt/data --kind stacks -o -`,
		Args: arguments("MOUNTPOINT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if output == "" {
				return usagef("name the file to write with -o")
			}
			if length.Duration > 10*time.Minute {
				return usagef("--for %s: 10m at most", length.Duration)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
			defer stop()
			f, err := createFile(cmd, output, "a profile", kind.word == "stacks")
			if err != nil {
				return err
			}
			doc, err := profile(ctx, args[0], kind.word, length.Duration)
			if err == nil {
				_, err = f.Write(doc)
			}
			return f.finish(err)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().Var(&kind, "kind", "what to record")
	cmd.Flags().Var(&length, "for", "how long to record; for cpu only")
	cmd.Flags().StringVarP(&output, "output", "o", "",
		"`FILE` to write, which must not exist, or a pipe or device; - is standard output")
	return cmd
}

// profile asks a mountpoint's daemon for a profile.
func profile(ctx context.Context, mountpoint, kind string, length time.Duration) ([]byte, error) {
	if _, err := askStatus(mountpoint, patience); err != nil {
		return nil, statusError(mountpoint, err)
	}
	doc, err := within(mountpoint, length+patience, func() ([]byte, error) {
		return gaiafs.Profile(ctx, mountpoint, profileKinds[kind], length)
	})
	switch {
	case ctx.Err() != nil:
		return nil, errors.New("interrupted")
	case err != nil:
		return nil, about(mountpoint, "", tooOld(err))
	}
	return doc, nil
}
