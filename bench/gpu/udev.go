package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// Even in compatibility mode, cuFile asks udev what is on a file's disk, and accepts no file if udev does not know.
// That is so in containers and virtual machines without udevd. There, a worker gets a record in a mount namespace of
// its own: no other process sees it, and it disappears with the worker.

const udevRecords = "udev/data" // in /run

// udevRecord returns the record that udev should have of a file's disk. It returns "" if udev has one, or if there is
// no disk.
func udevRecord(path string) (name, text string, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", "", fmt.Errorf("stat %s: %w", path, err)
	}
	if unix.Major(st.Dev) == 0 { // overlay, tmpfs and the like
		return "", "", nil
	}
	name = fmt.Sprintf("b%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	has, err := os.ReadFile(filepath.Join("/run", udevRecords, name))
	if strings.Contains(string(has), "E:ID_FS_USAGE=") {
		return "", "", nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", "", err
	}
	kind, _ := rows.Filesystem(path)
	return name, fmt.Sprintf("%sE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n", has, kind), nil
}

// mountNamespace names the mount namespace of this process.
func mountNamespace() (string, error) { return os.Readlink("/proc/self/ns/mnt") }

// showRecord puts a record where libudev looks for it, in the mount namespace of this process, which must not be the
// one named outside. Everything else in /run stays, by way of the folder kept.
func showRecord(outside, kept, name, text string) error {
	if mine, err := mountNamespace(); err != nil || mine == outside {
		return errors.Join(errors.New("this process has no mount namespace of its own"), err)
	}
	if err := os.MkdirAll(kept, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("/run", kept, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep /run: %w", err)
	}
	if err := unix.Mount("none", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("a folder in place of /run: %w", err)
	}
	link := func(folder, besides string) error {
		entries, err := os.ReadDir(filepath.Join(kept, folder))
		for _, e := range entries {
			if at := filepath.Join(folder, e.Name()); at != besides {
				err = errors.Join(err, os.Symlink(filepath.Join(kept, at), filepath.Join("/run", at)))
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	record := filepath.Join(udevRecords, name)
	if err := errors.Join(link("", "udev"), os.MkdirAll(filepath.Join("/run", udevRecords), 0o755),
		link("udev", udevRecords), link(udevRecords, record)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join("/run", record), []byte(text), 0o644)
}
