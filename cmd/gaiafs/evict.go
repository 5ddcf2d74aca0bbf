package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache"
)

func newEvict() *cobra.Command {
	device := deviceChoice{all: true}
	var recursive bool
	cmd := &cobra.Command{
		Use:   "evict PATH…",
		Short: "Free the device memory of files that nobody maps",
		Long: `evict frees the device memory of files, and of their views, that nobody maps. It first writes back what only a device has. What
SOURCE does not accept stays and is named; so does what is pinned. With --recursive it only counts files that had nothing. Only root and the user who mounted may evict.`,
		Example: `  gaiafs evict /mnt/data/old.safetensors
  gaiafs evict --recursive --device 1 /mnt/data/checkpoints`,
		Args: somePaths,
		RunE: func(cmd *cobra.Command, args []string) error {
			if device.host {
				return usagef("--device host: the kernel manages these pages; 'echo 1 > /proc/sys/vm/drop_caches' drops them")
			}
			found, failed, err := findReadable(cmd, args, recursive)
			if err != nil {
				return err
			}
			if !device.all {
				status, err := statusOf(found.mountpoint, patience)
				if err != nil {
					return statusError(found.mountpoint, err)
				}
				if !slices.ContainsFunc(status.Devices, func(d pagecache.DeviceStatus) bool {
					return d.Device == device.ordinal
				}) {
					return noDevice(device.ordinal, found.mountpoint)
				}
			}
			var stays error
			nothing := 0
			for _, f := range found.files {
				e, err := evict(cmd, f, device.number())
				if err != nil {
					return about(f.name(), "", err)
				}
				text := f.name() + ": " + bytesText(e.Freed) + " freed"
				if e.Mapped > 0 {
					text += "; " + bytesText(e.Mapped) + " stays because programs map it"
				}
				if e.Pinned > 0 {
					text += fmt.Sprintf("; %s stays: pinned on account of user %d ('gaiafs unpin' undoes that)",
						bytesText(e.Pinned),
						e.PinnedBy)
				}
				if e.Kept > 0 {
					text += "; " + bytesText(e.Kept) + " stays: " + e.why()
					stays = fmt.Errorf("%s: %s could not be freed: %s", f.name(), bytesText(e.Kept), e.why())
				}
				if recursive && e.Freed+e.Mapped+e.Pinned+e.Kept == 0 {
					nothing++
					continue
				}
				fmt.Fprintln(cmd.OutOrStdout(), text)
			}
			if nothing > 0 {
				thing := "other file"
				if nothing == len(found.files) {
					thing = "file"
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s had nothing there\n", count(nothing, thing))
			}
			return cmp.Or(stays, failed)
		},
	}
	cmd.Flags().Var(&device, "device", "free them on this device: `N|all`, where N is a number that 'gaiafs status' shows")
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "include the files below directories")
	return cmd
}

// eviction adds a method to the daemon's answer.
type eviction struct{ pagecache.Eviction }

func (e eviction) why() string {
	if e.Error != "" {
		return e.Error
	}
	return "it is in use right now"
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
	n, err := strconv.Atoi(strings.TrimPrefix(text, "gpu")) // as output names devices
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

// number returns the device for the daemon; -1 means all.
func (d *deviceChoice) number() int {
	if d.all {
		return -1
	}
	return d.ordinal
}
