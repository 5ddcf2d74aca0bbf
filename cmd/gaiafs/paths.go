package main

import (
	"encoding/json"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// onMount are files of one mount that a command is about.
type onMount struct {
	mountpoint string
	files      []target
}

// target is a file.
type target struct {
	path string
	size int64
}

// name is the path in a line of text for people.
func (f target) name() string { return pagecache.Printable(f.path) }

// findFiles finds the regular files that paths name, all of one mount, those below directories too where recursive says
// so. It asks the mount's daemon first, and fails where that does not answer.
func findFiles(paths []string, recursive bool) (*onMount, error) {
	found := &onMount{}
	for _, path := range paths {
		m, err := fs.MountOf(path)
		switch {
		case err != nil:
			return nil, err
		case m.Type != fs.Type:
			if _, err := os.Lstat(path); err != nil {
				return nil, pathError(path, err)
			}
			return nil, fmt.Errorf("%s is not on a mount of gaiafs: 'gaiafs status' lists those there are", path)
		case found.mountpoint == "":
			if _, err := askStatus(m.Mountpoint, patience); err != nil {
				return nil, statusError(m.Mountpoint, err)
			}
			found.mountpoint = m.Mountpoint
		case found.mountpoint != m.Mountpoint:
			return nil, usagef("%s is on another mount than %s: name files of one mount", path, paths[0])
		}
		if err := found.add(path, recursive); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// add adds a file, or those below a directory.
func (o *onMount) add(path string, recursive bool) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return pathError(path, err)
	case st.Mode().IsRegular():
		o.files = append(o.files, target{path, st.Size()})
		return nil
	case !st.IsDir():
		return fmt.Errorf("%s is neither a file nor a directory", path)
	case !recursive:
		return usagef("%s is a directory: --recursive takes the files below it", path)
	}
	return filepath.WalkDir(path, func(at string, entry iofs.DirEntry, err error) error {
		if err != nil {
			return pathError(at, err)
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		st, err := entry.Info()
		if errors.Is(err, os.ErrNotExist) { // removed meanwhile
			return nil
		}
		if err != nil {
			return pathError(at, err)
		}
		o.files = append(o.files, target{at, st.Size()})
		return nil
	})
}

// pathError is a sentence about a path that cannot be used.
func pathError(path string, err error) error {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s does not exist: check the spelling", path)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s: permission denied: only who may read a file is told of it, and brings it to devices",
			path)
	}
	return fmt.Errorf("%s: %w", path, errno(err))
}

// about says once which file or mountpoint an error is about. part, where it is not "", is what of it.
func about(name, part string, err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	var e *gaiafs.Error // its words begin with the library and the call
	if errors.As(err, &e) && text == e.Error() {
		text = strings.TrimPrefix(text, "gaiafs: "+e.Op+": ")
	}
	if strings.HasPrefix(text, name+":") || strings.HasPrefix(text, name+" ") {
		return err
	}
	if part != "" {
		name += ": " + part
	}
	return reworded{name + ": " + text, err}
}

// reworded is an error in other words.
type reworded struct {
	text string
	error
}

func (r reworded) Error() string { return r.text }
func (r reworded) Unwrap() error { return r.error }

// errno is the reason without the names that os puts around it.
func errno(err error) error {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

// open opens a file for reading.
func (f target) open() (*os.File, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return nil, pathError(f.path, err)
	}
	return file, nil
}

// tooOld explains that a daemon does not know a request.
func tooOld(err error) error {
	if errors.Is(err, syscall.ENOSYS) {
		return errors.New("the daemon is of an earlier version, which cannot do that: mount again with this one")
	}
	return err
}

// decode reads an answer of the daemon.
func decode[T any](doc []byte, err error) (T, error) {
	var v T
	if err != nil {
		return v, tooOld(err)
	}
	if err := json.Unmarshal(doc, &v); err != nil {
		return v, fmt.Errorf("the daemon's answer cannot be read: %w", err)
	}
	return v, nil
}

// somePaths checks that a command has a PATH at least.
func somePaths(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usagef("%s needs PATH, of a file on a mount of gaiafs", cmd.CommandPath())
	}
	return nil
}

// printJSON writes a value for scripts.
func printJSON(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	return e.Encode(v)
}
