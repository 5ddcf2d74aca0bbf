package rows

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// part is the suffix of a temporary file that replaces the real file when it is complete.
const part = ".part"

// openFlags never wait for a reader: a FIFO without a reader fails with ENXIO.
const openFlags = unix.O_WRONLY | unix.O_CREAT | unix.O_TRUNC | unix.O_NONBLOCK

// WriteFile makes write produce a file's content. A regular file is replaced when the content is complete, so a program
// that is killed leaves the old file. Links to the file are kept. A file that is not regular, such as a pipe or a
// terminal, is written to directly.
func WriteFile(path string, write func(io.Writer) error) error {
	at, err := replaced(path)
	if err != nil {
		return err
	}
	if at == "" {
		f, err := open(path, openFlags&^unix.O_CREAT, 0)
		if err != nil {
			return err
		}
		return fill(f, write)
	}
	mode := fs.FileMode(0o666)
	st, err := os.Stat(at)
	if err == nil {
		mode = st.Mode().Perm()
	}
	f, err := open(at+part, openFlags|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	if err := fill(f, write); err != nil {
		_ = os.Remove(at + part) // the error is what counts
		return err
	}
	return os.Rename(at+part, at)
}

func open(path string, flags int, mode fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flags, mode)
	if errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%w: nobody reads it", err)
	}
	return f, err
}

// fill writes a file and closes it.
func fill(f *os.File, write func(io.Writer) error) error {
	return errors.Join(write(f), f.Close())
}

// IsReplaced reports whether WriteFile would replace a file. If so, the file can be written several times.
func IsReplaced(path string) bool {
	at, err := replaced(path)
	return err == nil && at != ""
}

// replaced returns the regular file behind path, with all links followed. The file need not exist. It returns "" for
// anything else that can be written to.
func replaced(path string) (string, error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return follow(path)
	case err != nil:
		return "", err
	case st.IsDir():
		return "", &fs.PathError{Op: "open", Path: path, Err: unix.EISDIR}
	case !st.Mode().IsRegular():
		return "", nil
	}
	at, err := follow(path)
	if err != nil {
		return "", err
	}
	// A link in /proc leads to an open file, whatever name that file has or had.
	if same, err := os.Stat(at); err != nil || !os.SameFile(st, same) {
		return "", nil
	}
	return at, nil
}

// follow follows links, also to a file that does not exist.
func follow(path string) (string, error) {
	for range 40 { // the kernel's limit
		folder, name := filepath.Split(path)
		if folder == "" {
			folder = "."
		}
		folder, err := filepath.EvalSymlinks(folder)
		if err != nil {
			return "", err
		}
		path = filepath.Join(folder, name)
		link, err := os.Readlink(path)
		if err != nil { // not a link, or it does not exist
			return path, nil
		}
		if path = link; !filepath.IsAbs(link) {
			path = folder + "/" + link
		}
	}
	return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// CanBeWritten checks whether WriteFile would work. It changes nothing, and does not even open a FIFO: its reader would
// take the close for the end.
func CanBeWritten(path string) error {
	at, err := replaced(path)
	if err != nil {
		return err
	}
	if at == "" {
		return mayWrite(path)
	}
	if err := mayWrite(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(at+part, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) { // left by a run that was killed
		if st, err := os.Lstat(at + part); err == nil && !st.Mode().IsRegular() {
			return fmt.Errorf("%s is in the way", at+part)
		}
		return mayWrite(at + part)
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(at+part))
}

// mayWrite checks for write permission without opening.
func mayWrite(path string) error {
	if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return nil
}

// Touch reports whether writing one file would change the other, whatever their names. This includes the temporary file
// of the written one.
func Touch(written, other string) bool {
	for _, a := range []string{written, besides(written)} {
		for _, b := range []string{other, besides(other)} {
			if a != "" && b != "" && same(a, b) {
				return true
			}
		}
	}
	return false
}

// besides returns the name of the temporary file of WriteFile, or "" if it makes none.
func besides(path string) string {
	if at, err := replaced(path); err == nil && at != "" {
		return at + part
	}
	return ""
}

// same reports whether two names belong to one file, which need not exist. It is false for devices such as /dev/null,
// which can have many writers.
func same(a, b string) bool {
	x, errA := os.Stat(a)
	y, errB := os.Stat(b)
	if errA == nil && errB == nil {
		return os.SameFile(x, y) && x.Mode()&fs.ModeDevice == 0
	}
	if errA == nil || errB == nil {
		return false
	}
	a, errA = follow(a)
	b, errB = follow(b)
	return errA == nil && errB == nil && a == b
}
