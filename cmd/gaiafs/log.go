package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// openLog opens a log file for appending.
func openLog(path string) (*os.File, error) {
	f, err := openNotPlanted(path)
	if err != nil {
		return nil, fmt.Errorf("the log file cannot be opened: %w; choose another with --log-file", err)
	}
	return f, nil
}

// makeLog is openLog. unmake removes the file if this call made it.
func makeLog(path string) (f *os.File, unmake func(), err error) {
	_, missing := os.Lstat(path)
	f, err = openLog(path)
	if err != nil {
		return nil, nil, err
	}
	return f, func() {
		if errors.Is(missing, os.ErrNotExist) {
			_ = os.Remove(path) // a short file that nobody needs
		}
	}, nil
}

// makeDirectories is os.MkdirAll. unmake removes the directories that this call made and that are empty.
func makeDirectories(dir string, mode os.FileMode) (unmake func(), err error) {
	var missing []string
	for d := dir; d != filepath.Dir(d); d = filepath.Dir(d) {
		if _, err := os.Lstat(d); !errors.Is(err, os.ErrNotExist) {
			break
		}
		missing = append(missing, d)
	}
	return func() {
		for _, d := range missing {
			_ = os.Remove(d) // others may use it by now; then this fails
		}
	}, os.MkdirAll(dir, mode)
}

// openNotPlanted opens a file for appending, or creates it. In a directory where every user may create files, such as
// /tmp, it refuses what another user created before: a link to one of our files, or a file that the other user can
// read. The kernel does the same if fs.protected_symlinks and the like are set (proc_sys_fs(5)).
func openNotPlanted(path string) (*os.File, error) {
	nofollow := unix.O_NOFOLLOW
	if st, err := os.Lstat(path); err == nil {
		if err := planted(path, st); err != nil {
			return nil, err
		}
		if st.Mode()&os.ModeSymlink != 0 {
			nofollow = 0
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|nofollow, 0o640)
	if err != nil || nofollow == 0 {
		return f, err
	}
	st, err := f.Stat() // the file that was opened
	if err == nil {
		err = planted(path, st)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// planted returns an error if st, which is at path, belongs to another user and lies in a directory where every user
// may create files.
func planted(path string, st os.FileInfo) error {
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return err
	}
	owner := st.Sys().(*syscall.Stat_t).Uid
	everybody := dir.Mode()&os.ModeSticky != 0 && dir.Mode()&0o002 != 0
	if !everybody || int(owner) == os.Geteuid() || owner == dir.Sys().(*syscall.Stat_t).Uid {
		return nil
	}
	return errors.New(path + " was made by user " + fmt.Sprint(owner) + " in a folder where every user may make files")
}
