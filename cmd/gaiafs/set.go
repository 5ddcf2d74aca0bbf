package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// setPatience is how long set waits: a smaller budget may need bytes to be written back first.
const setPatience = 10 * time.Minute

func newSet() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "set MOUNTPOINT [NAME=VALUE…]",
		Short: "Change settings of a mount while it is in use",
		Long: `set changes settings of a mount that is in use: all that you name, or none of them. Names and values are those
of 'gaiafs mount'. A file that a value names is read by this command, not by the daemon. Without settings it shows those that can be changed. Changes last as long as the mount. Only root and
the user who mounted may change settings.

If gpu-memory or pinned-memory shrinks, set first evicts what nobody maps, and returns when that is done. What programs
map stays until they unmap it. If pinned memory is then still too small, set unlocks files that are pinned on the host.
They are locked again once there is room.`,
		Example: `  gaiafs set /mnt/data
  gaiafs set /mnt/data eviction=lfu
  gaiafs set /mnt/data gpu-memory=20G pinned-memory=64G`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return arguments("MOUNTPOINT")(cmd, args)
			}
			return nil
		},
		ValidArgsFunction: completeSet,
		RunE: func(cmd *cobra.Command, args []string) error {
			states, err := set(cmd.Context(), args[0], args[1:])
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd, states)
			}
			states.print(cmd.OutOrStdout(), len(args) == 1)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// set asks the daemon of a mountpoint to change settings.
func set(ctx context.Context, mountpoint string, settings []string) (settingStates, error) {
	if _, err := askStatus(mountpoint, patience); err != nil {
		return settingStates{}, statusError(mountpoint, err)
	}
	flags := newSettings().flags()
	for i, text := range settings { // the daemon opens no file for a client
		name, path, _ := strings.Cut(text, "=")
		flag := flags.Lookup(name)
		if flag == nil {
			continue
		}
		if f, ok := flag.Value.(fileSetting); ok {
			if err := f.Set(path); err != nil {
				return settingStates{}, usagef("%s: %w", name, err)
			}
			settings[i] = name + "=" + f.content()
		}
	}
	doc, err := within(mountpoint, setPatience, func() ([]byte,
		error) {
		return gaiafs.Set(ctx, mountpoint, settings...)
	})
	var refused *gaiafs.Error
	if errors.As(err, &refused) && refused.Errno != syscall.ENOSYS && refused.Text != "" {
		err = reworded{refused.Text, err} // the text says everything
		if refused.Errno == syscall.EINVAL {
			err = usageError{err}
		}
		return settingStates{}, err
	}
	return decode[settingStates](doc, err)
}

// print writes what was changed, or with all every live setting.
func (s settingStates) print(w io.Writer, all bool) {
	table(w, func(t io.Writer) {
		for _, one := range s.Settings {
			was := ""
			if one.Before != "" {
				was = "\twas " + one.Before
			}
			if all || was != "" {
				fmt.Fprintf(t, "%s\t%s%s\n", one.Name, one.Value, was)
			}
		}
	})
	for _, one := range s.Settings {
		if one.Note != "" && (all || one.Before != "") {
			fmt.Fprintf(w, "%s: %s\n", one.Name, one.Note)
		}
	}
}

// completeSet completes a mountpoint, then names of settings, then values that are words.
func completeSet(_ *cobra.Command, args []string, begin string) (words []string, _ cobra.ShellCompDirective) {
	if len(args) == 0 {
		return mountpoints(), cobra.ShellCompDirectiveNoFileComp
	}
	name, _, valued := strings.Cut(begin, "=")
	flags := newSettings().flags()
	for _, l := range liveSettings {
		f := flags.Lookup(l.name)
		choices, isChoice := f.Value.(*choice)
		switch {
		case !valued && strings.HasPrefix(l.name, begin):
			words = append(words, l.name+"=\t"+f.Usage)
		case valued && l.name == name && isChoice:
			for _, w := range choices.among {
				words = append(words, l.name+"="+w)
			}
		}
	}
	if valued {
		return words, cobra.ShellCompDirectiveNoFileComp
	}
	return words, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
