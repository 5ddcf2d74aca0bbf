package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// mount is a mount that a gaiafs in a separate process serves.
type mount struct {
	// source is the directory on the backing filesystem, dir the same directory on the mount.
	source, dir string
	cmd         *exec.Cmd
	said        bytes.Buffer // the daemon's output; complete once ended is closed
	ended       chan struct{}
}

// startMount mounts dir/source at dir/mnt, with more arguments, and returns when the mount is usable. The daemon writes
// released bytes home only on request, so no round pays for the one before it.
func startMount(ctx context.Context, program, dir, gpus string, memory int64, more ...string) (*mount, error) {
	m := &mount{source: filepath.Join(dir, "source"), dir: filepath.Join(dir, "mnt"), ended: make(chan struct{})}
	if err := errors.Join(os.Mkdir(m.source, 0o755), os.Mkdir(m.dir, 0o755)); err != nil {
		return nil, err
	}
	args := []string{"mount", "--config", os.DevNull, "--gpus", gpus, "--log-level", "warn", "--write-back-interval",
		"1h"}
	if memory > 0 {
		args = append(args, "--gpu-memory", fmt.Sprintf("%dB", memory))
	}
	m.cmd = exec.Command(program, append(append(args, more...), m.source, m.dir)...)
	m.cmd.Stdout, m.cmd.Stderr = &m.said, &m.said
	// It gets no Ctrl-C of the terminal, and ends if this program is killed.
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	if err := m.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w; name the gaiafs binary with --gaiafs", err)
	}
	go func() {
		_ = m.cmd.Wait()
		close(m.ended)
	}()
	for {
		_, err := m.status()
		if err == nil {
			return m, nil
		}
		select {
		case <-m.ended:
			return nil, fmt.Errorf("%s mount ended: %s", program, strings.TrimSpace(m.said.String()))
		case <-ctx.Done():
			m.close()
			return nil, fmt.Errorf("%s mount was not ready in time (%w): %w", program, err, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// close ends the daemon, which writes back and unmounts, and makes sure that nothing stays mounted.
func (m *mount) close() {
	_ = m.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-m.ended:
	case <-time.After(30 * time.Second):
		_ = m.cmd.Process.Kill()
		<-m.ended
	}
	if err := unix.Unmount(m.dir, unix.MNT_DETACH|unix.MNT_FORCE); errors.Is(err, unix.EPERM) {
		_ = exec.Command("fusermount3", "-u", "-z", m.dir).Run() // fails if the daemon unmounted, as it should
	}
}

// open opens a file of the mount.
func (m *mount) open(name string) (*os.File, error) {
	return os.OpenFile(m.path(name), os.O_RDWR, 0)
}

// path returns the path of a file on the mount.
func (m *mount) path(name string) string { return filepath.Join(m.dir, name) }

// home returns the path of a file on the backing filesystem.
func (m *mount) home(name string) string { return filepath.Join(m.source, name) }

// mapFile maps n bytes at off of a file of the mount.
func (m *mount) mapFile(name string, off, n int64, prot gaiafs.Prot, device int,
	options ...gaiafs.Option) (*gaiafs.Mapping, error) {
	f, err := m.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return gaiafs.Map(f, off, n, prot, device, append(options, gaiafs.Stays())...)
}

// lockNothing makes the daemon unlock the pages of files that are loaded again and again, and lock no more: the kernel
// cannot drop such pages.
func (m *mount) lockNothing(ctx context.Context, program string) error {
	if out, err := exec.CommandContext(ctx, program, "set", m.dir, "pinned-memory=0").CombinedOutput(); err != nil {
		return fmt.Errorf("%s set: %w: %s", program, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// forget makes a device evict what it holds of the n bytes at off of a file. None of them may be mapped.
func (m *mount) forget(name string, off, n int64, device int) error {
	x, err := m.mapFile(name, off, n, gaiafs.ProtRead, device, gaiafs.Lazy())
	if err != nil {
		return err
	}
	return errors.Join(x.Advise(0, n, gaiafs.AdviceDontNeed), x.Close())
}

// mountStatus is the part of docs/status.md that rows use.
type mountStatus struct {
	Devices []struct {
		Name   string `json:"name"`
		Memory int64  `json:"memory_bytes"`
		Used   int64  `json:"used_bytes"`
		Moved  []struct {
			Way   string `json:"way"`
			Bytes int64  `json:"bytes"`
		} `json:"moved"`
	} `json:"devices"`
	Counters map[string]int64 `json:"counters"`
}

func (m *mount) status() (s mountStatus, err error) {
	text, err := gaiafs.Status(m.dir)
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(text, &s)
}

// fromHost returns how many bytes came from the host to all devices so far.
func (m *mount) fromHost() (n int64, err error) {
	status, err := m.status()
	for _, d := range status.Devices {
		for _, x := range d.Moved {
			if x.Way == "in" {
				n += x.Bytes
			}
		}
	}
	return n, err
}

// counted calls f and returns how much it added to the mount's counters.
func (m *mount) counted(f func() error) (map[string]int64, error) {
	before, err := m.status()
	if err != nil {
		return nil, err
	}
	if err := f(); err != nil {
		return nil, err
	}
	after, err := m.status()
	if err != nil {
		return nil, err
	}
	for name, n := range before.Counters {
		if after.Counters[name] -= n; after.Counters[name] == 0 {
			delete(after.Counters, name)
		}
	}
	return after.Counters, nil
}

// addressOf returns where a mapping begins, for kernels and copies.
func addressOf(m *gaiafs.Mapping) address { return address(m.DevicePointer()) }
