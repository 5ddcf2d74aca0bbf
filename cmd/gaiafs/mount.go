package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

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
		Long: `mount shows the directory SOURCE at the empty directory MOUNTPOINT and serves it until it is unmounted by 'gaiafs umount',
by umount(8), or by SIGTERM, SIGINT or (if it has a terminal) SIGHUP to this process. Before it ends, it writes back what devices hold. While SOURCE does not
accept that, the mount stays, and the log says what is waiting. A second signal, 0.2 seconds later or more, ends it
without waiting any longer; the log names what is lost.

When the mount is usable, one line on standard output says where it is and which devices it has. Without a GPU, the line says why,
and that emulated devices are used instead.

Each setting is also read from the environment (GAIAFS_GPU_MEMORY for --gpu-memory) and from a configuration file in TOML
(gpu-memory = "4G"): the file named by --config or GAIAFS_CONFIG, or else ~/.config/gaiafs/config.toml and then
/etc/gaiafs.toml. Flags take precedence over the environment, and the environment over files.`,
		Example: `  gaiafs mount ~/data /mnt/data                          # in the foreground; Ctrl-C ends it
  gaiafs mount --daemon ~/data /mnt/data                 # returns when /mnt/data is usable
  gaiafs mount --gpus emulated:2 --gpu-memory 512M ~/data /mnt/data
  GAIAFS_LOG_LEVEL=debug gaiafs mount --read-only /srv/models /mnt/models`,
		Args: arguments("SOURCE", "MOUNTPOINT"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			// Catch signals before there is a mount that they could leave behind.
			signals := make(chan os.Signal, 2)
			tell := func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), "gaiafs:", text) }
			report := func(ready string, err error) error {
				if err == nil {
					// The mount goes on if nobody reads this line.
					_, _ = fmt.Fprintln(beneath(cmd.OutOrStdout()), ready)
				}
				return err
			}
			if readyFD > 0 {
				report = reporter(readyFD, func() { hangUp(signals) })
			} else {
				unknownVariables(os.Environ(), tell) // printed once, by the process that the user started
			}
			if err := complete(cmd.Flags(), config, osEnvironment); err != nil {
				return report("", err)
			}
			m, err := newMountPlan(s, args[0], args[1])
			if err != nil {
				return report("", err)
			}
			if daemon && readyFD == 0 { // the new process gets the same command line, and a descriptor
				if err := m.readableAgain(config, osEnvironment); err != nil {
					return report("", err)
				}
				tellEarlier(m.mountpoint, tell)
				ready, err := startDaemon(m, os.Args[1:])
				return report(ready, err)
			}
			if readyFD > 0 || !hasTerminal() {
				signal.Ignore(syscall.SIGHUP) // nobody hung up; it asks other daemons to read their settings again
			}
			signal.Notify(signals, endingSignals()...)
			defer signal.Stop(signals)
			return m.serve(signals, readyFD > 0, cmd.ErrOrStderr(), report)
		},
	}
	cmd.Flags().AddFlagSet(s.flags())
	cmd.Flags().BoolVar(&daemon, "daemon", false, "serve in the background; return when the mount is usable")
	cmd.Flags().StringVar(&config, "config", "", "read the settings from the TOML file `PATH`, and from no other file")
	cmd.Flags().IntVar(&readyFD, "ready-fd", 0,
		"report the outcome of mounting through this descriptor, and log to standard error")
	if err := errors.Join(cmd.Flags().MarkHidden("ready-fd"), cmd.MarkFlagFilename("config", "toml"),
		cmd.RegisterFlagCompletionFunc("gpus", cobra.FixedCompletions([]string{"auto", "none", "emulated:1", "cuda:0"},
			cobra.ShellCompDirectiveNoFileComp))); err != nil {
		panic(err) // a flag name is wrong
	}
	return cmd
}

// readableAgain returns an error if a file of the plan can be read only by this process.
func (m *mountPlan) readableAgain(config string, environment func(string) (string, bool)) error {
	if config == "" {
		config, _ = environment(variable("config"))
	}
	for _, file := range []struct{ name, path string }{{"config", config}, {"tenants", m.tenants.path},
		{"priorities", m.priorities.path}} {
		if file.path == "" {
			continue
		}
		if err := readAgain(file.path); err != nil {
			return usagef("--%s with --daemon: %w", file.name, err)
		}
	}
	return nil
}

// hasTerminal reports whether this process has a controlling terminal, which may be closed.
func hasTerminal() bool {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// mountPlan describes a mount that is about to be made. Its paths are absolute.
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
	m.mountpoint = resolve(mountpoint) // errors are reported later
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
	if err := m.checkMetrics(); err != nil {
		return nil, err
	}
	if s.hostMemory == 0 {
		s.hostMemory = newSettings().hostMemory
	}
	if s.hostMemory < leastHostMemory {
		return nil, usagef("--host-memory is %d bytes, and the least is %dMiB: the daemon takes tens of MiB in any "+
			"case, so a smaller value saves nothing and only makes programs wait; leave it out to have gaiafs choose",
			s.hostMemory, leastHostMemory>>20)
	}
	// A GPU may need more. Opening it reports that.
	if memory := s.gpuMemory.size; memory > 0 && memory < emulated.Granularity && !s.gpus.none() {
		return nil, usagef("--gpu-memory is %d bytes, but a device needs at least %dMiB; leave it out to "+
			"have gaiafs choose",
			memory, emulated.Granularity>>20)
	}
	return m, nil
}
