package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// pinAttribute is the extended attribute that holds the pin of a file or directory.
const pinAttribute = fs.AttributePin

func newPin() *cobra.Command {
	device := deviceChoice{all: true}
	cmd := &cobra.Command{
		Use:   "pin PATH…",
		Short: "Keep files on devices, or in the host's memory, until they are unpinned",
		Long: `pin brings files to devices and keeps them there, even if others need the memory. For a directory it pins all files below, also
those that are made later: they stay once they are on the device. A file's own pin takes precedence over its directory's.
A new pin replaces the one that a file or directory has.

Users may pin the files that they may write. The memory counts for the file's owner, within what one user may map (--user-share). If
the files do not fit, pin fails and pins nothing. SOURCE keeps the pin in the extended attribute user.gaiafs.pin, so the next
mount knows it; 'gaiafs warm --recursive' brings the files back there. 'setfattr -n user.gaiafs.pin -v 0,1 FILE' pins too, but
brings nothing to devices: its value is none, or a list of all, host and numbers of devices, separated by commas.

--device host pins files in the host's memory: their pages stay in its page cache, page-locked, so GPUs copy from there
at the full speed of their links, and no core copies. This pays for weights that are loaded again and again, or by
several GPUs at once. The memory counts as pinned memory (--pinned-memory), at least 16 MiB for each file. If a file
changes, its pages are unlocked; they are locked again once the file has not changed for two seconds. 'gaiafs info'
shows how much is locked, or why it is not.`,
		Example: `  gaiafs pin /mnt/data/model.safetensors
  gaiafs pin --device 0 /mnt/data/models
  gaiafs pin --device host /mnt/data/model.safetensors
  getfattr -n user.gaiafs.pin /mnt/data/models`,
		Args: somePaths,
		RunE: func(cmd *cobra.Command, args []string) error {
			return pin(cmd, args, device)
		},
	}
	cmd.Flags().Var(&device, "device", "pin them on this device: `N|all|host`, where N is a number that 'gaiafs status' shows")
	return cmd
}

func newUnpin() *cobra.Command {
	return &cobra.Command{
		Use:   "unpin PATH…",
		Short: "Let files leave devices again when others need the memory, and unlock them on the host",
		Long: `unpin undoes pin. It evicts nothing at once. Pages that are locked on the host are unlocked. A file below a
pinned directory gets the pin none, which takes precedence over the directory's.`,
		Example: "  gaiafs unpin /mnt/data/model.safetensors",
		Args:    somePaths,
		RunE: func(cmd *cobra.Command, args []string) error {
			found, err := findFiles(args, true)
			if err != nil {
				return err
			}
			at, err := newPinner(found.mountpoint)
			if err != nil {
				return err
			}
			for _, path := range args {
				if err := at.unpin(path); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: unpinned\n", pagecache.Printable(path))
			}
			return at.look(cmd.Context(), found.files)
		},
	}
}

func pin(cmd *cobra.Command, args []string, device deviceChoice) error {
	found, err := findFiles(args, true)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
	defer stop()
	at, err := newPinner(found.mountpoint)
	if err != nil {
		return err
	}
	w := warming{device: device, out: cmd.OutOrStdout()}
	devices, err := w.among(at.status.Devices, found.mountpoint)
	if err != nil {
		return err
	}
	if device.host {
		devices = nil // it is enough that there is one
	}
	for _, d := range devices {
		fit, need, room, err := fitting(found.files, d, staysOn(ctx, d.Device))
		if err != nil {
			return err
		}
		if len(fit) < len(found.files) {
			return fmt.Errorf("%w: nothing was pinned; %s, or pin fewer", noRoom(d, need, room, len(found.files)),
				moreMemory)
		}
	}
	before := make([]string, len(args))
	for i, path := range args {
		before[i] = at.get(path)
		if err := at.set(path, device.String()); err != nil {
			return errors.Join(err, at.restore(args[:i], before))
		}
	}
	if err := at.look(ctx, found.files); err != nil {
		return err
	}
	bring := func() error { return w.bring(ctx, cmd, found.files, devices) }
	if device.host {
		bring = func() error { return w.onHost(ctx, cmd, found.files, "locked in the host's memory", w.lockFile) }
	}
	switch err := bring(); {
	case device.host && err != nil, errors.Is(err, syscall.ENOMEM): // a tenant's maximum, or programs were faster
		if failed := at.restore(args, before); failed != nil {
			return errors.Join(err, failed)
		}
		return fmt.Errorf("%w: nothing was pinned", errors.Join(err, at.look(ctx, found.files)))
	case err != nil:
		return fmt.Errorf("%w (the pins stay: 'gaiafs unpin' removes them)", err)
	}
	for _, path := range args {
		fmt.Fprintf(cmd.OutOrStdout(), "%s: pinned on %s\n", pagecache.Printable(path), pinnedText(device.String()))
	}
	return nil
}

// lockFile locks a file, and meanwhile shows how far it is.
func (w *warming) lockFile(ctx context.Context, f target) error {
	file, err := f.open()
	if err != nil {
		return err
	}
	defer file.Close()
	locked := make(chan error, 1)
	go func() { locked <- gaiafs.LockHost(ctx, file) }()
	before := int64(0)
	for {
		select {
		case err := <-locked:
			w.progress.add(f.size-before, f.name())
			return err
		case <-time.After(terminalEvery):
			if info, err := inspect(ctx, f); err == nil {
				w.progress.add(info.LockedBytes-before, f.name())
				before = info.LockedBytes
			}
		}
	}
}

// pinnedText names the places of a pin.
func pinnedText(pin string) string {
	var places []string
	for word := range strings.SplitSeq(pin, ",") {
		switch word {
		case "all":
			places = append(places, "all devices")
		case "host":
			places = append(places, "the host")
		default:
			places = append(places, "gpu"+word)
		}
	}
	return strings.Join(places, ", ")
}

// pinner sets pins on a mount.
type pinner struct {
	mountpoint string
	status     statusDocument
}

func newPinner(mountpoint string) (*pinner, error) {
	status, err := statusOf(mountpoint, patience)
	if err != nil {
		return nil, statusError(mountpoint, err)
	}
	return &pinner{mountpoint, status}, nil
}

// place returns where path's attributes can be written. On a read-only mount, that is in SOURCE.
func (p *pinner) place(path string) (string, error) {
	if !p.status.Mount.ReadOnly {
		return path, nil
	}
	full, err := filepath.Abs(path)
	if err == nil {
		full, err = filepath.EvalSymlinks(full)
	}
	if err != nil {
		return "", pathError(path, err)
	}
	below, err := filepath.Rel(p.mountpoint, full)
	if err != nil {
		return "", err
	}
	return filepath.Join(p.status.Mount.Source, below), nil
}

func (p *pinner) set(path, value string) error {
	at, err := p.place(path)
	if err != nil {
		return err
	}
	err = unix.Setxattr(at, pinAttribute, []byte(value), 0)
	if errors.Is(err, syscall.ENOSPC) && value == "host" {
		return fmt.Errorf("%s does not fit into the mount's pinned memory (%s) together with what is pinned there: "+
			"unpin something, or give it more with 'gaiafs set %s pinned-memory=SIZE'", pagecache.Printable(path),
			bytesText(p.status.PinnedLimit), pagecache.Printable(p.mountpoint))
	}
	return p.explain(path, err)
}

// get returns the value of a path's attribute, "" if it has none.
func (p *pinner) get(path string) string {
	at, err := p.place(path)
	if err != nil {
		return "" // set reports it
	}
	value := make([]byte, 1<<10)
	n, err := unix.Getxattr(at, pinAttribute, value)
	if err != nil {
		return ""
	}
	return string(value[:n])
}

// restore gives paths the values that get returned.
func (p *pinner) restore(paths, values []string) (failed error) {
	for i, path := range paths {
		if values[i] == "" {
			failed = errors.Join(failed, p.unpin(path))
		} else {
			failed = errors.Join(failed, p.set(path, values[i]))
		}
	}
	return failed
}

// unpin removes the attribute, or sets it to none if a directory above is pinned.
func (p *pinner) unpin(path string) error {
	at, err := p.place(path)
	if err != nil {
		return err
	}
	if err := unix.Removexattr(at, pinAttribute); err != nil && !errors.Is(err, syscall.ENODATA) {
		return p.explain(path, err)
	}
	full, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	for dir := filepath.Dir(full); len(dir) >= len(p.mountpoint); dir = filepath.Dir(dir) {
		value := make([]byte, 1<<10)
		n, err := unix.Getxattr(dir, pinAttribute, value)
		if err != nil {
			continue
		}
		if above, err := pagecache.ParsePinning(string(value[:n])); err == nil && above.Any() {
			return p.set(path, "none")
		}
		return nil
	}
	return nil
}

// look makes the daemon read the pins of files, which it may not have done yet.
func (p *pinner) look(ctx context.Context, files []target) error {
	for _, f := range files {
		if _, err := inspect(ctx, f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// explain describes an error of the attribute.
func (p *pinner) explain(path string, err error) error {
	path = pagecache.Printable(path)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%s: this exceeds what its owner may pin: unpin something, or raise user-share "+
			"with 'gaiafs set'", path)
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%s does not fit into the device's budget together with what is pinned: unpin something, or "+
			moreMemory, path)
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%s: the filesystem of %s does not support extended attributes, which hold the pins", path,
			p.status.Mount.Source)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%s: permission denied: pinning needs permission to write the file (on a read-only mount, in %s)", path,
			p.status.Mount.Source)
	}
	return fmt.Errorf("%s: %s: %w", path, strconv.Quote(pinAttribute), err)
}
