package mounttest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/model"
)

// changeSource carries out a step directly in SOURCE, without the mount. It returns what Oracle.Event needs.
func (x *system) changeSource(s model.Step) ([]byte, error) {
	if err := x.waitFlights(); err != nil {
		return nil, err
	}
	fd, off := int(x.home.Fd()), x.base+s.Off
	switch s.Op {
	case model.SourceWrite:
		_, err := x.home.WriteAt(s.Bytes(), off)
		return nil, err
	case model.SourceAppend:
		size, err := x.home.Seek(0, io.SeekEnd)
		if err == nil {
			_, err = x.home.WriteAt(s.Bytes(), size)
		}
		return nil, err
	case model.SourceTruncate:
		return nil, x.home.Truncate(off)
	case model.SourcePunch:
		return nil, refused(unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, s.Len))
	case model.SourceCollapse, model.SourceInsert:
		mode := uint32(unix.FALLOC_FL_COLLAPSE_RANGE)
		if s.Op == model.SourceInsert {
			mode = unix.FALLOC_FL_INSERT_RANGE
		}
		if err := refused(unix.Fallocate(fd, mode, off, s.Len)); err != nil {
			return nil, err
		}
		home, err := x.Home()
		if err != nil {
			return nil, err
		}
		return home[s.Off:], nil
	case model.SourceClone:
		return x.clone(s)
	case model.SourceSnapshot:
		return nil, x.snapshot(s, nil)
	case model.SourceChmod:
		return nil, x.home.Chmod(0o600 | os.FileMode(s.Val)&0o77)
	case model.SourceLink:
		x.links++
		return nil, os.Link(x.sourcePath(), fmt.Sprint(x.sourcePath(), "-link", x.links))
	case model.SourceRename:
		x.links++
		name := fmt.Sprint("renamed", x.files, "-", x.links)
		if err := os.Rename(x.sourcePath(), filepath.Join(x.mount.Source, name)); err != nil {
			return nil, err
		}
		x.name = name
		return nil, nil
	}
	return nil, fmt.Errorf("%v is not possible in SOURCE", s.Op)
}

func (x *system) sourcePath() string { return filepath.Join(x.mount.Source, x.name) }

// snapshot makes a reflink of the file, writes into the reflink, and calls then with it.
func (x *system) snapshot(s model.Step, then func(f *os.File) error) error {
	f, err := os.CreateTemp(x.mount.Source, "reflink")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := refused(unix.IoctlFileClone(int(f.Fd()), int(x.home.Fd()))); err != nil {
		return err
	}
	if _, err := f.WriteAt(s.Bytes(), x.base+s.Off); err != nil || then == nil {
		return err
	}
	return then(f)
}

// clone replaces the file's blocks by those of a reflink that was written to. It returns all bytes of the file after
// that.
func (x *system) clone(s model.Step) (home []byte, err error) {
	err = x.snapshot(s, func(f *os.File) error {
		if home, err = readWhole(f, x.base); err != nil {
			return err
		}
		return unix.IoctlFileClone(int(x.home.Fd()), int(f.Fd()))
	})
	return home, err
}

// readWhole returns the bytes of a file from base on.
func readWhole(f *os.File, base int64) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b := make([]byte, max(st.Size()-base, 0))
	n, err := f.ReadAt(b, base)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

// refused turns errors of calls that not every filesystem supports into model.ErrRefused.
func refused(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTTY) {
		return model.ErrRefused
	}
	return err
}
