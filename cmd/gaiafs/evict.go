package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache"
)

func newEvict() *cobra.Command {
	device := deviceChoice{all: true}
	var recursive bool
	cmd := &cobra.Command{
		Use:   "evict PATH…",
		Short: "Take files from devices that nobody maps",
		Long: `evict gives back what devices hold of files and nobody maps, views too. What only a device has is written back first; what
SOURCE does not take stays, and is named, and so does what is pinned. Only root and the user who mounted may do that.

'setfattr -n user.gaiafs.evict -v all FILE' does the same for one file; the value may be a device's number.`,
		Example: `  gaiafs evict /mnt/data/old.safetensors
  gaiafs evict --recursive --device 1 /mnt/data/checkpoints`,
		Args: somePaths,
		RunE: func(cmd *cobra.Command, args []string) error {
			if device.host {
				return usagef("--device host: the kernel keeps those pages; 'echo 1 > /proc/sys/vm/drop_caches' drops them")
			}
			found, err := findFiles(args, recursive)
			if err != nil {
				return err
			}
			var stays error
			for _, f := range found.files {
				e, err := evict(cmd, f, device.number())
				if err != nil {
					return about(f.name(), "", err)
				}
				text := f.name() + ": " + bytesText(e.Freed) + " given back"
				if e.Mapped > 0 {
					text += "; " + bytesText(e.Mapped) + " stays, since programs map it"
				}
				if e.Pinned > 0 {
					text += fmt.Sprintf("; %s stays: pinned on account of user %d ('gaiafs unpin' takes that back)",
						bytesText(e.Pinned),
						e.PinnedBy)
				}
				if e.Kept > 0 {
					text += "; " + bytesText(e.Kept) + " stays: " + e.why()
					stays = fmt.Errorf("%s: %s could not be given back: %s", f.name(), bytesText(e.Kept), e.why())
				}
				fmt.Fprintln(cmd.OutOrStdout(), text)
			}
			return stays
		},
	}
	cmd.Flags().Var(&device, "device", "take them from device `N|all`: a number as 'gaiafs status' has it, or all")
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "take the files below directories")
	return cmd
}

// eviction is the daemon's answer.
type eviction struct{ pagecache.Eviction }

func (e eviction) why() string {
	if e.Error != "" {
		return e.Error
	}
	return "it is in use this moment"
}

func evict(cmd *cobra.Command, f target, device int) (eviction, error) {
	file, err := f.open()
	if err != nil {
		return eviction{}, err
	}
	defer file.Close()
	e, err := decode[pagecache.Eviction](gaiafs.Evict(cmd.Context(), file, device))
	return eviction{e}, err
}

// deviceChoice is the value of --device.
type deviceChoice struct {
	all, host bool
	ordinal   int
}

func (d *deviceChoice) Set(text string) error {
	switch text {
	case "all":
		*d = deviceChoice{all: true}
		return nil
	case "host":
		*d = deviceChoice{host: true}
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > 254 {
		return fmt.Errorf("%q is neither a device's number, nor all, nor host", text)
	}
	*d = deviceChoice{ordinal: n}
	return nil
}

func (d *deviceChoice) String() string {
	switch {
	case d.all:
		return "all"
	case d.host:
		return "host"
	}
	return strconv.Itoa(d.ordinal)
}

func (d *deviceChoice) Type() string { return "N|all|host" }

// number is the device for the daemon: -1 for all.
func (d *deviceChoice) number() int {
	if d.all {
		return -1
	}
	return d.ordinal
}
