package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/pagecache"
)

// warmStep is how many bytes one request asks for. progress is updated after each.
const warmStep = 64 << 20

func newWarm() *cobra.Command {
	w := warming{device: deviceChoice{all: true}}
	cmd := &cobra.Command{
		Use:   "warm PATH…",
		Short: "Bring files to devices, or into the host's memory, before programs ask for them",
		Long: `warm brings files to devices. They stay there until the memory is needed for others, and programs that map them find them there.
Files that do not fit into what programs leave unmapped, and files that the user may not read, are left out; warm says so, and exits
with 1.

Weights that Python programs load with the package gaiafs are in memory of their own, where each tensor is aligned:
'python3 -m gaiafs warm' brings these.

--check only shows what is on the devices and up to date. --verify makes the device hash what it holds, and compares that with the
backing file. Both exit with 1 if something is missing or different.`,
		Example: `  gaiafs warm /mnt/data/model.safetensors
  gaiafs warm --recursive --device 0 /mnt/data/models
  gaiafs warm --check --device all /mnt/data/model.safetensors
  gaiafs warm --verify --device 0 /mnt/data/model.safetensors`,
		Args: somePaths,
		RunE: func(cmd *cobra.Command, args []string) error { return w.run(cmd, args) },
	}
	cmd.Flags().Var(&w.device, "device", "bring them to this device: `N|all|host`, where N is a number that 'gaiafs status' shows")
	cmd.Flags().BoolVarP(&w.recursive, "recursive", "r", false, "include the files below directories")
	cmd.Flags().BoolVar(&w.check, "check", false, "only show what is on devices")
	cmd.Flags().BoolVar(&w.verify, "verify", false, "only compare what is on devices with the backing files")
	return cmd
}

// warming holds the options of warm.
type warming struct {
	device                   deviceChoice
	recursive, check, verify bool
	out                      io.Writer
	progress                 *progress
}

func (w *warming) run(cmd *cobra.Command, args []string) error {
	if w.check && w.verify {
		return usagef("give --check or --verify, not both")
	}
	if w.device.host && (w.check || w.verify) {
		return usagef("--check and --verify need a device: name one, or all")
	}
	found, failed, err := findReadable(cmd, args, w.recursive)
	if err != nil {
		return err
	}
	return cmp.Or(w.files(cmd, found), failed)
}

// files does what the flags say with files of a mount.
func (w *warming) files(cmd *cobra.Command, found *onMount) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), endingSignals()...)
	defer stop()
	w.out = cmd.OutOrStdout()
	status, err := statusOf(found.mountpoint, patience)
	if err != nil {
		return statusError(found.mountpoint, err)
	}
	if w.device.host {
		return w.host(ctx, cmd, found.files)
	}
	devices, err := w.among(status.Devices, found.mountpoint)
	switch {
	case err != nil:
		return err
	case w.check:
		return w.eachFile(found.files, func(f target) error { return w.checkFile(ctx, f, devices) })
	case w.verify:
		return w.eachFile(found.files, func(f target) error { return w.verifyFile(ctx, f, devices) })
	}
	return w.bring(ctx, cmd, found.files, devices)
}

// among returns the chosen ones of a mount's devices.
func (w *warming) among(all []pagecache.DeviceStatus, mountpoint string) (devices []pagecache.DeviceStatus, err error) {
	for _, d := range all {
		if w.device.all || w.device.host || d.Device == w.device.ordinal {
			devices = append(devices, d)
		}
	}
	switch {
	case len(all) == 0:
		return nil, fmt.Errorf("the mount has no devices (--gpus none): 'gaiafs warm --device host' brings files into the host's memory")
	case len(devices) == 0:
		return nil, noDevice(w.device.ordinal, mountpoint)
	}
	return devices, nil
}

// noDevice returns the error for a device that a mount does not have.
func noDevice(ordinal int, mountpoint string) error {
	return fmt.Errorf("the mount has no device %d: 'gaiafs status %s' lists its devices", ordinal, mountpoint)
}

// bring brings files to devices.
func (w *warming) bring(ctx context.Context, cmd *cobra.Command, files []target,
	devices []pagecache.DeviceStatus) (failed error) {
	for _, d := range devices {
		failed = errors.Join(failed, w.warmDevice(ctx, cmd, files, d))
	}
	if i := slices.IndexFunc(files, func(f target) bool { return strings.HasSuffix(f.path, ".safetensors") }); i >= 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "note: %s is on the device as it is. load_safetensors uses an aligned copy, which takes as much "+
			"again: 'python3 -m gaiafs warm' brings that one instead\n", files[i].name())
	}
	return failed
}

// eachFile checks all files, also after one that fails its check.
func (w *warming) eachFile(files []target, check func(target) error) (failed error) {
	wrong := 0
	for _, f := range files {
		if err := check(f); errors.Is(err, errNotAll) {
			wrong++
		} else if err != nil {
			return err
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %s: %w", wrong, count(len(files), "file"), errNotAll)
	}
	return nil
}

// errNotAll says that a check found something missing or different.
var errNotAll = errors.New("something is missing or different")

func (w *warming) checkFile(ctx context.Context, f target, devices []pagecache.DeviceStatus) (err error) {
	info, err := inspect(ctx, f)
	if err != nil {
		return err
	}
	for _, d := range devices {
		r := residencyInfo{Device: d.Device, Absent: info.SizeBytes}
		for _, has := range info.Residency {
			if has.Device == d.Device {
				r = has
			}
		}
		fmt.Fprintf(w.out, "%s: gpu%d: %s\n", f.name(), d.Device, r)
		if r.Current < info.SizeBytes {
			err = errNotAll
		}
	}
	return err
}

func (w *warming) verifyFile(ctx context.Context, f target, devices []pagecache.DeviceStatus) error {
	file, err := f.open()
	if err != nil {
		return err
	}
	defer file.Close()
	var wrong error
	for _, d := range devices {
		var sum pagecache.Verification
		err := steps(f.size, func(off, n int64) error {
			v, err := decode[pagecache.Verification](gaiafs.Verify(ctx, file, d.Device, off, n))
			sum.Equal, sum.Different, sum.Stale = sum.Equal+v.Equal, sum.Different+v.Different, sum.Stale+v.Stale
			sum.Dirty, sum.Tracked, sum.Absent = sum.Dirty+v.Dirty, sum.Tracked+v.Tracked, sum.Absent+v.Absent
			sum.Where = append(sum.Where, v.Where...)
			return err
		})
		if err != nil {
			return about(f.name(), fmt.Sprintf("gpu%d", d.Device), interrupted(ctx, err))
		}
		var parts []string
		for _, part := range []struct {
			pages int64
			what  string
		}{{sum.Equal, "as in the backing file"}, {sum.Different, "DIFFERENT"}, {sum.Stale, "stale"},
			{sum.Dirty, "newer than the backing file"}, {sum.Tracked, "being written"}, {sum.Absent, "absent"}} {
			if part.pages > 0 {
				parts = append(parts, bytesText(bytesOf(part.pages, f.size))+" "+part.what)
			}
		}
		if len(parts) == 0 {
			parts = []string{"empty"}
		}
		text := strings.Join(parts, ", ")
		if len(sum.Where) > 0 {
			text += fmt.Sprintf("; the first page that differs is at byte %d", sum.Where[0].Offset())
		}
		fmt.Fprintf(w.out, "%s: gpu%d: %s\n", f.name(), d.Device, text)
		if sum.Different+sum.Absent > 0 {
			wrong = errNotAll
		}
	}
	return wrong
}

// interrupted returns err, or another error if a signal came.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return err
}

// steps calls do for each warmStep bytes of a file.
func steps(size int64, do func(off, n int64) error) error {
	for off := int64(0); off < size; off += warmStep {
		if err := do(off, min(warmStep, size-off)); err != nil {
			return err
		}
	}
	return nil
}

// fitting returns the files that fit into what is neither mapped nor pinned, in order, and how much all files need.
// stays returns how much of a file a device has and keeps in any case.
func fitting(files []target, d pagecache.DeviceStatus, stays func(target) (int64,
	error)) (fit []target, need, room int64, err error) {
	room = d.MemoryBytes - d.MappedBytes - d.PinnedIdleBytes
	taken := int64(0)
	for _, f := range files {
		size := (f.size + emulated.Granularity - 1) &^ (emulated.Granularity - 1)
		if d.MappedBytes+d.PinnedIdleBytes > 0 {
			there, err := stays(f)
			if err != nil {
				return nil, 0, 0, err
			}
			size = max(size-there, 0)
		}
		need += size
		if taken+size <= room {
			taken += size
			fit = append(fit, f)
		}
	}
	return fit, need, room, nil
}

// staysOn returns the function stays for fitting.
func staysOn(ctx context.Context, device int) func(target) (int64, error) {
	return func(f target) (bytes int64, err error) {
		in, err := inspect(ctx, f)
		if err != nil {
			return 0, err
		}
		stays := slices.ContainsFunc(in.MappedBy, func(m pagecache.MappingInfo) bool {
			return m.Device == device && !m.View // a view has memory of its own
		})
		if p, err := pagecache.ParsePinning(in.Pinned); err == nil {
			stays = stays || p.On(device)
		}
		for _, h := range in.Holders {
			if stays && h.Device == device {
				bytes += h.Memory
			}
		}
		return bytes, nil
	}
}

func (w *warming) warmDevice(ctx context.Context, cmd *cobra.Command, files []target, d pagecache.DeviceStatus) error {
	fit, need, room, err := fitting(files, d, staysOn(ctx, d.Device))
	if err != nil {
		return err
	}
	w.progress = newProgress(cmd.ErrOrStderr(), total(fit))
	defer w.progress.end()
	for _, f := range fit {
		if err := w.warmFile(ctx, f, d.Device); err != nil {
			w.progress.end()
			return about(f.name(), fmt.Sprintf("gpu%d", d.Device), interrupted(ctx, err))
		}
	}
	w.progress.end()
	if len(fit) == len(files) {
		return nil
	}
	brought := "nothing was brought"
	if len(fit) > 0 {
		brought = fmt.Sprintf("%s of %s fit, and the others were left out", bytesText(total(fit)),
			count(len(fit), "file"))
	}
	return fmt.Errorf("%w: %s; %s, or name fewer", noRoom(d, need, room, len(files)), brought, moreMemory)
}

// moreMemory is advice on how to enlarge a device's budget.
const moreMemory = "give the mount more memory with 'gaiafs set MOUNTPOINT gpu-memory=SIZE'"

// noRoom returns the error for files that do not fit on a device.
func noRoom(d pagecache.DeviceStatus, need, room int64, files int) error {
	return fmt.Errorf("gpu%d: %s are needed for %s, and %s of its %s are neither mapped by programs nor pinned",
		d.Device, bytesText(need),
		count(files, "file"), bytesText(max(room, 0)), bytesText(d.MemoryBytes))
}

func total(files []target) (bytes int64) {
	for _, f := range files {
		bytes += f.size
	}
	return bytes
}

func (w *warming) warmFile(ctx context.Context, f target, device int) error {
	file, err := f.open()
	if err != nil {
		return err
	}
	defer file.Close()
	// Include what CPU programs wrote and the kernel still holds (sync_file_range(2)).
	const flush = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if err := unix.SyncFileRange(int(file.Fd()), 0, 0, flush); err != nil && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("the kernel's pages could not be written back: %w", err)
	}
	brought := int64(0)
	err = steps(f.size, func(off, n int64) error {
		got, err := decode[warmed](gaiafs.Warm(ctx, file, device, off, n))
		brought += got.Pages
		w.progress.add(n, f.name())
		return err
	})
	if err == nil {
		w.progress.line(w.out, fmt.Sprintf("%s: %s on gpu%d, %s of it was there before", f.name(), bytesText(f.size), device,
			bytesText(f.size-bytesOf(brought, f.size))))
	}
	return err
}

// host reads files through the mount, so that the kernel caches them.
func (w *warming) host(ctx context.Context, cmd *cobra.Command, files []target) error {
	return w.onHost(ctx, cmd, files, "in the host's memory", w.readFile)
}

// onHost brings files into the host's memory, one after the other, and says so.
func (w *warming) onHost(ctx context.Context, cmd *cobra.Command, files []target, where string,
	bring func(context.Context, target) error) error {
	w.progress = newProgress(cmd.ErrOrStderr(), total(files))
	defer w.progress.end()
	for _, f := range files {
		if err := bring(ctx, f); err != nil {
			w.progress.end()
			return about(f.name(), "", interrupted(ctx, err))
		}
		w.progress.line(w.out, fmt.Sprintf("%s: %s %s", f.name(), bytesText(f.size), where))
	}
	return nil
}

// readFile reads a file to its end.
func (w *warming) readFile(ctx context.Context, f target) error {
	file, err := f.open()
	if err != nil {
		return err
	}
	defer file.Close()
	for buf := make([]byte, 1<<20); ; {
		n, err := file.Read(buf)
		w.progress.add(int64(n), f.name())
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return errno(err)
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}
