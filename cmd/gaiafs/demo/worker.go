package demo

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// job is the first line of a program's standard input. A second line gives the start signal.
type job struct {
	Program program `json:"program"`
	// Directory is the mountpoint, Output the name of the output file in it.
	Directory string `json:"directory"`
	Output    string `json:"output"`
	Grid      grid   `json:"grid"`
	// Device is the number of the program's device, or noDevice for the CPU.
	Device int `json:"device"`
	// Band is the number of rows between two releases.
	Band int `json:"band"`
}

// noDevice stands for the CPU.
const noDevice = -1

func (j job) layout() layout { return layout{w: j.Grid.W, h: j.Grid.H} }

// message is one line of JSON from a program.
type message struct {
	// Ready says that everything is open and mapped.
	Ready bool `json:"ready,omitempty"`
	// Rows is how many rows are stored so far.
	Rows int `json:"rows,omitempty"`
	// Done is in the last message.
	Done *work `json:"done,omitempty"`
}

// work is what a program did.
type work struct {
	// Pages counts the pages of the output file that it stored into. A device program counts the pages that its
	// releases found.
	Pages int64 `json:"pages"`
	// Seconds is the time from the start signal to the end of the last store or release.
	Seconds float64 `json:"seconds"`
}

// Work is the body of both programs: it reads a job from in, does it, and reports to out. It runs in a separate
// process.
func Work(in io.Reader, out io.Writer) (err error) {
	lines := bufio.NewReader(in)
	var j job
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("no job on standard input: %w", err)
	}
	if err := json.Unmarshal(line, &j); err != nil {
		return fmt.Errorf("the job on standard input cannot be read: %w", err)
	}
	say := json.NewEncoder(out).Encode

	f, err := os.OpenFile(filepath.Join(j.Directory, j.Output), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	target, err := j.open(f)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := target.close(); err == nil {
			err = cerr
		}
	}()
	if err := say(message{Ready: true}); err != nil {
		return err
	}
	if _, err := lines.ReadBytes('\n'); err != nil {
		return fmt.Errorf("the demo ended before the start: %w", err)
	}

	start := time.Now()
	var w work
	rows := 0
	err = j.layout().paint(j.Program, j.Grid, target.tile, target.file, j.Band, func(y0, y1 int) error {
		pages, err := target.band(y0, y1)
		if err != nil {
			return err
		}
		w.Pages += pages
		rows += y1 - y0
		return say(message{Rows: rows})
	})
	if err != nil {
		return err
	}
	w.Seconds = time.Since(start).Seconds()
	return say(message{Done: &w})
}

// target is the output file as a program sees it.
type target struct {
	file io.WriterAt
	tile opener
	// band is called after the rows [y0, y1) are stored. It returns how many pages they touched.
	band  func(y0, y1 int) (pages int64, err error)
	close func() error
}

// open maps f for the job's program.
func (j job) open(f *os.File) (*target, error) {
	if j.Device != noDevice {
		return j.openDevice(f)
	}
	return j.openCPU(f)
}

// memory is the contents of a file in memory that the CPU addresses.
type memory []byte

func (m memory) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

// openCPU is for an ordinary program: it maps the output and reads the tiles, and knows nothing of gaiafs.
func (j job) openCPU(f *os.File) (*target, error) {
	l := j.layout()
	bytes, err := unix.Mmap(int(f.Fd()), 0, int(l.size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %s: %w", f.Name(), err)
	}
	return &target{
		file: memory(bytes),
		tile: func(t tile) ([]byte, func() error, error) {
			file, err := os.ReadFile(filepath.Join(j.Directory, t.name()))
			return file, func() error { return nil }, err
		},
		band: func(y0, y1 int) (pages int64, err error) {
			for y := y0; y < y1; y++ {
				written, _ := l.pages(j.Program, y)
				pages += written
			}
			return pages, nil
		},
		close: func() error { return unix.Munmap(bytes) },
	}, nil
}

// openDevice is for a device program: it maps the output and the tiles into device memory, and releases its stores band
// by band.
func (j job) openDevice(f *os.File) (*target, error) {
	l := j.layout()
	m, err := gaiafs.Map(f, 0, l.size(), gaiafs.ProtRead|gaiafs.ProtWrite, j.Device, gaiafs.Stays())
	if err != nil {
		return nil, err
	}
	return &target{
		file: m, // stores into device memory
		tile: j.mapTile,
		band: func(y0, y1 int) (int64, error) {
			off, _ := l.span(leftProgram, y0)
			return m.Release(off, int64(y1-y0)*l.stride())
		},
		close: m.Close,
	}, nil
}

func (j job) mapTile(t tile) ([]byte, func() error, error) {
	f, err := os.Open(filepath.Join(j.Directory, t.name()))
	if err != nil {
		return nil, nil, err
	}
	m, err := gaiafs.Map(f, 0, t.fileSize(), gaiafs.ProtRead, j.Device, gaiafs.Stays())
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, err
	}
	if m.Kind() == gaiafs.KindEmulated {
		return m.Bytes(), m.Close, nil
	}
	file := make([]byte, m.Len())
	_, err = m.ReadAt(file, 0)
	return file, func() error { return nil }, errors.Join(err, m.Close())
}
