package mounttest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/model"
)

// wider carries out a CPU program's step that only wider programs have.
func (p *program) wider(o order) ([]byte, error) {
	s, fd := o.Step, int(p.file.Fd())
	off := p.base + s.Off
	switch s.Op {
	case model.Append:
		return nil, p.append(o)
	case model.DirectWrite:
		_, err := p.direct.WriteAt(s.Bytes(), off)
		return nil, err
	case model.OpenTrunc:
		f, err := os.OpenFile(o.Path, os.O_RDWR|os.O_TRUNC, 0)
		if err == nil && p.base > 0 {
			err = f.Truncate(p.base)
		}
		return nil, errors.Join(err, f.Close())
	case model.Allocate:
		return nil, fallocate(fd, 0, s.Keep, off, s.Len)
	case model.Zero:
		return nil, fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, s.Keep, off, s.Len)
	case model.PunchRest:
		return nil, fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE, true, off, 1<<63-1-off)
	case model.SeekRead:
		return p.seekRead(off, s.Len)
	case model.Copy:
		from, to := p.base+s.From, off
		return nil, copyRange(fd, &from, fd, &to, s.Len)
	case model.CopyOut:
		return p.copyOut(o)
	case model.Stat:
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, err
		}
		return model.AppendStat(nil, st.Size-p.base, time.Unix(st.Mtim.Unix())), nil
	case model.SetTimes:
		at := unix.NsecToTimespec(s.Time().UnixNano())
		return nil, unix.UtimesNanoAt(fd, "", []unix.Timespec{at, at}, unix.AT_EMPTY_PATH)
	case model.Chmod:
		return nil, p.file.Chmod(0o600 | os.FileMode(s.Val)&0o77)
	case model.Unlink:
		return nil, os.Remove(o.Path)
	}
	return nil, fmt.Errorf("a program cannot do %v", s.Op)
}

func fallocate(fd int, mode uint32, keep bool, off, n int64) error {
	if keep {
		mode |= unix.FALLOC_FL_KEEP_SIZE
	}
	err := unix.Fallocate(fd, mode, off, n)
	// EFBIG: the largest size of ext4 is smaller than that of the other filesystems.
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EFBIG) {
		return model.ErrRefused
	}
	return err
}

func (p *program) append(o order) error {
	f, err := os.OpenFile(fmt.Sprint("/proc/self/fd/", p.file.Fd()), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(o.Step.Bytes())
	if err == nil && o.SyncRange {
		err = unix.SyncFileRange(int(f.Fd()), 0, 0, syncAll)
	}
	return errors.Join(err, f.Close())
}

// seekRead reads as cp --sparse does.
func (p *program) seekRead(off, n int64) ([]byte, error) {
	end, err := p.file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	end = min(end, off+n)
	if end <= off {
		return nil, nil
	}
	b := make([]byte, end-off)
	for at := off; at < end; {
		data, err := unix.Seek(int(p.file.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("SEEK_DATA: %w", err)
		}
		hole, err := unix.Seek(int(p.file.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("SEEK_HOLE: %w", err)
		}
		if data < at || hole <= data {
			return nil, fmt.Errorf("from %d on there is data at %d, and a hole at %d", at, data, hole)
		}
		if data < end {
			if _, err := p.file.ReadAt(b[data-off:min(hole, end)-off], data); err != nil {
				return nil, err
			}
		}
		at = hole
	}
	return b, nil
}

func copyRange(from int, off *int64, to int, at *int64, n int64) error {
	for n > 0 {
		m, err := unix.CopyFileRange(from, off, to, at, int(n), 0)
		if err != nil {
			return fmt.Errorf("copy_file_range: %w", err)
		}
		if m == 0 {
			return io.ErrUnexpectedEOF
		}
		n -= int64(m)
	}
	return nil
}

// copyOut copies to another file of the mount and returns that file's bytes.
func (p *program) copyOut(o order) ([]byte, error) {
	st, err := p.file.Stat()
	if err != nil {
		return nil, err
	}
	off := p.base + o.Step.Off
	n := max(min(o.Step.Len, st.Size()-off), 0)
	f, err := os.CreateTemp(filepath.Dir(o.Path), "copy")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := copyRange(int(p.file.Fd()), &off, int(f.Fd()), nil, n); err != nil {
		return nil, err
	}
	return readAt(f, 0, n+1)
}

// peek returns length bytes of the file as they are in the memory that the client was given, beyond its mapping. Parts
// without memory are zero.
func (p *program) peek(length int64) ([]byte, error) {
	out := make([]byte, length)
	start := uintptr(p.mapping.DevicePointer())
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(maps)) {
		var from, to uintptr
		var rights string
		var at int64
		if _, err := fmt.Sscanf(line, "%x-%x %s %x", &from, &to, &rights, &at); err != nil {
			return nil, fmt.Errorf("%s: %w", line, err)
		}
		if from < start || from >= start+uintptr(p.mapping.Len()) || rights == "---p" { // or a hole
			continue
		}
		memory, err := os.Open(fmt.Sprintf("/proc/self/map_files/%x-%x", from, to))
		if err != nil {
			return nil, err
		}
		whole, err := readWhole(memory, 0)
		if err := errors.Join(err, memory.Close()); err != nil {
			return nil, err
		}
		// Offset of the memory's first byte, as the program counts.
		begin := p.start + int64(from-start) - at - p.base
		for i, b := range whole {
			if j := begin + int64(i); j >= 0 && j < length {
				out[j] = b
			}
		}
	}
	return out, nil
}
