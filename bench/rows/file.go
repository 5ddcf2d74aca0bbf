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

// part is the name, after that of a file, of what takes its place when it is whole.
const part = ".part"

// openFlags never wait for a reader: with ENXIO a FIFO says that it has none.
const openFlags = unix.O_WRONLY | unix.O_CREAT | unix.O_TRUNC | unix.O_NONBLOCK

// WriteFile has write make a file's content. A regular file is replaced when that is whole, so that whoever ends the
// program meanwhile finds the one of before; links to it stay. What is no regular file, as a pipe or a terminal, is
// written to.
func WriteFile(path string, write func(io.Writer) error) error {
	at, err := replaced(path)
	if err != nil {
		return err
	}
	if at == "" {
		return fill(path, openFlags&^unix.O_CREAT, 0, write)
	}
	mode := fs.FileMode(0o666)
	st, err := os.Stat(at)
	if err == nil {
		mode = st.Mode().Perm()
	}
	if err := fill(at+part, openFlags|unix.O_NOFOLLOW, mode, write); err != nil {
		return err
	}
	return os.Rename(at+part, at)
}

// fill writes a file.
func fill(path string, flags int, mode fs.FileMode, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, flags, mode)
	if errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("%w: nobody reads it", err)
	}
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// IsReplaced reports whether WriteFile would replace a file, so that it can be written again and again.
func IsReplaced(path string) bool {
	at, err := replaced(path)
	return err == nil && at != ""
}

// replaced returns the regular file that path stands for, which need not be there yet, with all links followed; ""
// where there is something else that can be written to.
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
	// A link of /proc leads to an open file whatever its name is, or that it has none any more.
	if same, err := os.Stat(at); err != nil || !os.SameFile(st, same) {
		return "", nil
	}
	return at, nil
}

// follow follows links, also one to a file that is not there.
func follow(path string) (string, error) {
	for range 40 { // as many as the kernel follows
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
		if err != nil { // it is no link, or not there
			return path, nil
		}
		if path = link; !filepath.IsAbs(link) {
			path = folder + "/" + link
		}
	}
	return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// CanBeWritten finds out whether WriteFile can do its work. It leaves what is there as it is: a FIFO is not even
// opened, since its reader would take the close for the end.
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
	if errors.Is(err, fs.ErrExist) { // of a run that was killed
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

// mayWrite asks for the right to write, without opening.
func mayWrite(path string) error {
	if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return nil
}

// Touch reports whether writing one file would change the other, under whatever names: a file that is to be written is
// also what stands for it until it is whole.
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

// besides names what WriteFile makes beside a file; "" for nothing.
func besides(path string) string {
	if at, err := replaced(path); err == nil && at != "" {
		return at + part
	}
	return ""
}

// same reports whether two names are of one file, which need not be there. A device, as /dev/null, can be written by
// many.
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
