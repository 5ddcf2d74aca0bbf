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
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// onMount is the set of files of one mount that a command acts on.
type onMount struct {
	mountpoint string
	files      []target
	// goOn says that files that cannot be read go to unreadable, with the reason. Otherwise they are errors.
	goOn       bool
	unreadable []error
}

// target is a file.
type target struct {
	path string
	size int64
}

// name returns the path for a line of text.
func (f target) name() string { return pagecache.Printable(f.path) }

// findFiles finds the regular files that paths name, and with recursive those below directories too. All must be on one
// mount. It first asks the mount's daemon, and fails if that does not answer.
func findFiles(paths []string, recursive bool) (*onMount, error) {
	found := &onMount{}
	return found, found.find(paths, recursive)
}

// findReadable is findFiles for commands that go on with the other files if some cannot be read. It prints why. The
// command returns failed when it is done.
func findReadable(cmd *cobra.Command, paths []string, recursive bool) (found *onMount, failed, err error) {
	found = &onMount{goOn: true}
	if err := found.find(paths, recursive); err != nil {
		return nil, nil, err
	}
	if len(found.unreadable) == 0 {
		return found, nil, nil
	}
	for _, why := range found.unreadable {
		fmt.Fprintf(cmd.ErrOrStderr(), "gaiafs: %s\n", withoutControls(why.Error()))
	}
	failed = loggedError{errors.Join(found.unreadable...)}
	if len(found.files) == 0 {
		return nil, nil, failed
	}
	return found, failed, nil
}

// skip notes a file that cannot be read, or returns why.
func (o *onMount) skip(why error) error {
	if !o.goOn {
		return why
	}
	o.unreadable = append(o.unreadable, why)
	return nil
}

func (o *onMount) find(paths []string, recursive bool) error {
	for _, path := range paths {
		m, err := fs.MountOf(path)
		switch {
		case err != nil:
			if err := o.skip(err); err != nil {
				return err
			}
			continue
		case m.Type != fs.Type:
			if _, err := os.Lstat(path); err != nil {
				if err := o.skip(pathError(path, err)); err != nil {
					return err
				}
				continue
			}
			return fmt.Errorf("%s is not on a mount of gaiafs: 'gaiafs status' lists the mounts", path)
		case o.mountpoint == "":
			if _, err := askStatus(m.Mountpoint, patience); err != nil {
				return statusError(m.Mountpoint, err)
			}
			o.mountpoint = m.Mountpoint
		case o.mountpoint != m.Mountpoint:
			return usagef("%s is on another mount than %s: name files of one mount", path, paths[0])
		}
		if err := o.add(path, recursive); err != nil {
			return err
		}
	}
	return nil
}

// add adds a file, or the files below a directory.
func (o *onMount) add(path string, recursive bool) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return o.skip(pathError(path, err))
	case st.Mode().IsRegular():
		return o.addFile(path, st.Size())
	case !st.IsDir():
		return fmt.Errorf("%s is neither a file nor a directory", path)
	case !recursive:
		return usagef("%s is a directory: --recursive takes the files below it", path)
	}
	return filepath.WalkDir(path, func(at string, entry iofs.DirEntry, err error) error {
		if err != nil { // for a directory, after its entry: WalkDir goes on behind it
			return o.skip(pathError(at, err))
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		st, err := entry.Info()
		if errors.Is(err, os.ErrNotExist) { // removed since the listing
			return nil
		}
		if err != nil {
			return o.skip(pathError(at, err))
		}
		return o.addFile(at, st.Size())
	})
}

// addFile adds a file, if it can be read or that is not to be checked yet.
func (o *onMount) addFile(path string, size int64) error {
	if o.goOn {
		if err := unix.Faccessat(unix.AT_FDCWD, path, unix.R_OK, unix.AT_EACCESS); err != nil {
			return o.skip(pathError(path, err))
		}
	}
	o.files = append(o.files, target{path, size})
	return nil
}

// pathError describes why a path cannot be used.
func pathError(path string, err error) error {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s does not exist: check the spelling", path)
	case errors.Is(err, syscall.ENOTCONN):
		if m, at := fs.MountOf(path); at == nil && m.Type == fs.Type {
			return hasEnded(m)
		}
		return fmt.Errorf("%s: %w: the daemon of a mount has ended", path, errno(err))
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s: permission denied: you need permission to read a file to see it or bring it to devices",
			path)
	}
	return fmt.Errorf("%s: %w", path, errno(err))
}

// about adds to an error, once, the file or mountpoint that it is about. part, if not "", is the part of it.
func about(name, part string, err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	var e *gaiafs.Error // its text begins with the library and the call
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

// reworded is an error with another text.
type reworded struct {
	text string
	error
}

func (r reworded) Error() string { return r.text }
func (r reworded) Unwrap() error { return r.error }

// errno returns the reason without the names that os adds to it.
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

// tooOld explains the error of a daemon that does not know a request.
func tooOld(err error) error {
	if errors.Is(err, syscall.ENOSYS) {
		return errors.New("the daemon's version is too old to do that: mount again with this version")
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

// somePaths checks that a command has at least one PATH.
func somePaths(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usagef("%s needs the PATH of a file on a mount of gaiafs", commandName(cmd))
	}
	return nil
}

// printJSON prints a value as JSON.
func printJSON(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	return e.Encode(v)
}
