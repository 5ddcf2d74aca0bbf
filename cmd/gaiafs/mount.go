package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

func newMount() *cobra.Command {
	s := newSettings()
	var daemon bool
	var config string
	var readyFD int
	cmd := &cobra.Command{
		Use:   "mount SOURCE MOUNTPOINT",
		Short: "Show a directory at a mountpoint",
		Long: `mount shows the directory SOURCE at the empty directory MOUNTPOINT and serves it until it is unmounted, by
'gaiafs umount', by umount(8), or by SIGTERM or SIGINT to this process. Whatever devices hold by then is written back
before it ends. While SOURCE does not take it, the mount stays, and the log says what waits. A second signal ends it without
waiting any longer; the log names what is lost.

When the mount can be used, one line on standard output says where it is, and with which devices. Where there is no GPU it
says why, and that emulated devices stand in.

Each setting is also read from the environment (GAIAFS_GPU_MEMORY for --gpu-memory) and from a configuration file in TOML
(gpu-memory = "4G"): the one named by --config or GAIAFS_CONFIG, else ~/.config/gaiafs/config.toml and then
/etc/gaiafs.toml. A flag counts more than the environment, and that more than a file.`,
		Example: `  gaiafs mount ~/data /mnt/data                          # in the foreground; Ctrl-C ends it
  gaiafs mount --daemon ~/data /mnt/data                 # returns when /mnt/data can be used
  gaiafs mount --gpus emulated:2 --gpu-memory 512M ~/data /mnt/data
  GAIAFS_LOG_LEVEL=debug gaiafs mount --read-only /srv/models /mnt/models`,
		Args: arguments("SOURCE", "MOUNTPOINT"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			// Signals are caught before there is a mount that they could leave behind.
			signals := make(chan os.Signal, 2)
			tell := func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), "gaiafs:", text) }
			report := func(ready string, err error) error {
				if err == nil {
					// Nobody reading it is no reason to end.
					_, _ = fmt.Fprintln(beneath(cmd.OutOrStdout()), ready)
				}
				return err
			}
			if readyFD > 0 {
				report = reporter(readyFD, func() { hangUp(signals) })
			} else {
				unknownVariables(os.Environ(), tell) // said once, by the process that people started
			}
			if err := complete(cmd.Flags(), config, osEnvironment); err != nil {
				return report("", err)
			}
			m, err := newMountPlan(s, args[0], args[1])
			if err != nil {
				return report("", err)
			}
			if daemon && readyFD == 0 { // the process that is started gets the same command line, and a descriptor
				tellEarlier(m.mountpoint, tell)
				ready, err := startDaemon(m, os.Args[1:])
				return report(ready, err)
			}
			signal.Notify(signals, endingSignals()...)
			defer signal.Stop(signals)
			return m.serve(signals, readyFD > 0, cmd.ErrOrStderr(), report)
		},
	}
	cmd.Flags().AddFlagSet(s.flags())
	cmd.Flags().BoolVar(&daemon, "daemon", false, "go on in the background; return when the mount can be used")
	cmd.Flags().StringVar(&config, "config", "", "read the settings from the TOML file `PATH`, and from no other")
	cmd.Flags().IntVar(&readyFD, "ready-fd", 0,
		"tell the outcome of mounting through this descriptor, and log to standard error")
	if err := errors.Join(cmd.Flags().MarkHidden("ready-fd"), cmd.MarkFlagFilename("config", "toml"),
		cmd.RegisterFlagCompletionFunc("gpus", cobra.FixedCompletions([]string{"auto", "none", "emulated:1", "cuda:0"},
			cobra.ShellCompDirectiveNoFileComp))); err != nil {
		panic(err) // a flag is not named as above
	}
	return cmd
}

// mountPlan is a mount to be made. Its paths are absolute.
type mountPlan struct {
	*settings
	source, mountpoint string
	level              slog.LevelVar // of the log
}

func newMountPlan(s *settings, source, mountpoint string) (*mountPlan, error) {
	m := &mountPlan{settings: s}
	var err error
	if m.source, err = filepath.Abs(source); err != nil {
		return nil, err
	}
	m.mountpoint = resolve(mountpoint) // what is wrong with it is said later
	if s.logFile != "" {
		if s.logFile, err = filepath.Abs(s.logFile); err != nil {
			return nil, err
		}
	}
	if s.socket != "" {
		if err := control.CheckSocket(s.socket); err != nil {
			return nil, usagef("--socket %s: %w", s.socket, err)
		}
	}
	if s.kernelOpens && !s.readOnly {
		return nil, usagef("--kernel-opens is for mounts that are --read-only: add that, or leave it out")
	}
	if err := m.checkMetrics(); err != nil {
		return nil, err
	}
	if s.hostMemory == 0 {
		s.hostMemory = newSettings().hostMemory
	}
	if s.hostMemory < leastHostMemory {
		return nil, usagef("--host-memory is %d bytes, and the least is %dMiB: the daemon takes tens of MiB in any "+
			"case, so that less saves nothing and only has programs wait; leave it out to have gaiafs choose",
			s.hostMemory, leastHostMemory>>20)
	}
	// A GPU may ask for more, and says so when it is opened.
	if memory := s.gpuMemory.size; memory > 0 && memory < emulated.Granularity && !s.gpus.none() {
		return nil, usagef("--gpu-memory is %d bytes, and a device needs %dMiB at least; leave it out to "+
			"have gaiafs choose",
			memory, emulated.Granularity>>20)
	}
	return m, nil
}
