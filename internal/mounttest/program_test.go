package mounttest

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/model"
)

const programVariable = "GAIAFS_MOUNTTEST_PROGRAM"

// order tells a program to open a file and close the last one, or to carry out a step on its file.
type order struct {
	Open string
	// Base is the offset in the file that steps call 0.
	Base int64
	// Limit is how many bytes of the file a CPU program maps, regardless of the file's size.
	Limit int64
	// MapDirect makes it map a descriptor with O_DIRECT.
	MapDirect bool
	Device    int
	// Kind is the device's kind, if that matters.
	Kind gaiafs.Kind
	Step model.Step
	// SyncRange makes a Write ask for write-back of its range.
	SyncRange bool
	// Path is the file's path, for steps that need one.
	Path string
	// Alone says that no other program has memory that a bracket could wait for.
	Alone bool
	// Beside is the path of the second file that programs with movable mappings use.
	Beside string
}

type answer struct {
	Data    []byte
	Err     string
	Refused bool
	// Open is how many brackets the program has open.
	Open int
}

// serveProgram is the main loop of a program's process.
func serveProgram(in io.Reader, out io.Writer) error {
	orders, answers := gob.NewDecoder(in), gob.NewEncoder(out)
	var p program
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				return p.close()
			}
			return err
		}
		data, err := p.carryOut(o)
		a := answer{Data: data, Open: len(p.brackets)}
		if err != nil {
			a.Err, a.Refused = err.Error(), errors.Is(err, model.ErrRefused)
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

// program is the state of a program's process.
type program struct {
	file, direct *os.File
	base         int64  // offset in the file that steps call 0
	memory       []byte // the file, mapped shared
	mapping      *gaiafs.Mapping
	view         *gaiafs.View
	start        int64 // offset of mapping in the file
	brackets     []bracket
	beside       beside
}

func (p *program) close() error {
	errs := []error{p.closeMoving()}
	if p.mapping != nil {
		errs = append(errs, p.mapping.Close())
	}
	if p.view != nil {
		errs = append(errs, p.view.Close())
	}
	if p.memory != nil {
		errs = append(errs, unix.Munmap(p.memory))
	}
	for _, f := range []*os.File{p.file, p.direct} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	*p = program{beside: p.beside}
	return errors.Join(errs...)
}

func (p *program) open(o order) (err error) {
	if err := p.close(); err != nil {
		return err
	}
	if p.file, err = os.OpenFile(o.Open, os.O_RDWR, 0); err != nil {
		return err
	}
	p.base = o.Base
	if o.Limit == 0 {
		return nil
	}
	if p.direct, err = os.OpenFile(o.Open, os.O_RDWR|unix.O_DIRECT, 0); err != nil {
		return err
	}
	mapped := p.file
	if o.MapDirect {
		mapped = p.direct
	}
	if p.memory, err = unix.Mmap(int(mapped.Fd()), p.base, int(o.Limit), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		return err
	}
	// The kernel must read only the pages that a step touches.
	return errors.Join(unix.Madvise(p.memory, unix.MADV_RANDOM), unix.Fadvise(int(p.file.Fd()), 0, 0, unix.FADV_RANDOM))
}

func (p *program) carryOut(o order) ([]byte, error) {
	if o.Open != "" {
		return nil, p.open(o)
	}
	s, fd := o.Step, int(p.file.Fd())
	off := p.base + s.Off
	switch s.Op {
	case model.Write:
		if _, err := p.file.WriteAt(s.Bytes(), off); err != nil || !o.SyncRange {
			return nil, err
		}
		return nil, unix.SyncFileRange(fd, off, s.Len, syncAll)
	case model.MapStore:
		copy(p.memory[s.Off:], s.Bytes())
	case model.Read:
		return readAt(p.file, off, s.Len)
	case model.DirectRead:
		return readAt(p.direct, off, s.Len)
	case model.Fsync:
		return nil, p.file.Sync()
	case model.Truncate:
		return nil, p.file.Truncate(off)
	case model.Punch:
		return nil, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, s.Len)
	case model.Flush:
		return nil, unix.SyncFileRange(fd, off, s.Len, syncAll)
	case model.Reclaim:
		return nil, unix.Fadvise(fd, off, s.Len, unix.FADV_DONTNEED)
	default:
		if s.Op < model.Map {
			return p.wider(o)
		}
		return p.gpu(o)
	}
	return nil, nil
}

const syncAll = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER

func readAt(f *os.File, off, length int64) ([]byte, error) {
	b := make([]byte, length)
	n, err := f.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

func (p *program) gpu(o order) (data []byte, err error) {
	s, m := o.Step, p.mapping
	if s.Op.OfViews() {
		return p.viewStep(o)
	}
	// The part of the step's range that the mapping has.
	off, n := p.base+s.Off-p.start, s.Len
	if m != nil && s.Op != model.Store && s.Op != model.Load && s.Op != model.Group {
		end := min(off+n, m.Len())
		off = max(off, 0)
		n = end - off
	}
	if p.bracketed(s) {
		return p.movingStep(o, off, n)
	}
	switch s.Op {
	case model.Map:
		return nil, p.mapStep(o)
	case model.Unmap:
		p.mapping = nil
		return nil, m.Close()
	case model.Store:
		_, err = m.WriteAt(s.Bytes(), off)
	case model.Load:
		data = make([]byte, n)
		_, err = m.ReadAt(data, off)
		return data, err
	case model.Group:
		err = group(m, off, s.Bytes())
	case model.Acquire:
		_, err = m.Acquire(off, n)
	case model.Release:
		_, err = m.Release(off, n)
	case model.Collect:
		err = m.Flush(off, n)
	case model.Peek:
		return p.peek(s.Len)
	case model.DontNeed:
		err = m.Advise(off, n, gaiafs.AdviceDontNeed)
	default:
		err = fmt.Errorf("a program cannot do %v", s.Op)
	}
	return nil, err
}

// mapStep makes the mapping.
func (p *program) mapStep(o order) (err error) {
	s, prot := o.Step, gaiafs.ProtRead
	if s.Writable {
		prot |= gaiafs.ProtWrite
	}
	options := []gaiafs.Option{gaiafs.OnKind(o.Kind)}
	if s.Lazy {
		options = append(options, gaiafs.Lazy())
	}
	if s.Movable {
		options = append(options, gaiafs.Movable())
	}
	p.start = p.base + s.Off
	if p.mapping, err = gaiafs.Map(p.file, p.start, s.Len, prot, o.Device, options...); err != nil {
		if o.Beside != "" {
			err = refusal(err)
		}
		return err
	}
	// Only what a step asks for is fetched.
	return p.mapping.Advise(0, s.Len, gaiafs.AdviceRandom)
}

// group stores bytes in a group of their pages.
func group(m *gaiafs.Mapping, off int64, b []byte) error {
	g, err := gaiafs.Begin(gaiafs.Range{Of: m, Off: off, Len: int64(len(b))})
	if err != nil {
		return err
	}
	if _, err = m.WriteAt(b, off); err == nil {
		_, err = g.Release()
	}
	return err
}

// viewStep carries out a step about views.
func (p *program) viewStep(o order) (data []byte, err error) {
	s, v := o.Step, p.view
	switch s.Op {
	case model.View:
		var segments []gaiafs.Segment
		for _, g := range s.Segments() {
			segments = append(segments, gaiafs.Segment{Offset: p.base + g.Off, Length: g.Len, Stride: g.Stride,
				Count: g.Count})
		}
		options := []gaiafs.Option{gaiafs.Align(s.Align()), gaiafs.OnKind(o.Kind)}
		if s.Lazy {
			options = append(options, gaiafs.Lazy())
		}
		p.view, err = gaiafs.MapView([]*os.File{p.file}, segments, o.Device, options...)
		if o.Beside != "" {
			err = refusal(err)
		}
	case model.Look:
		off, n := s.Part(v.Len())
		if _, err := v.Acquire(off, n); err != nil {
			return nil, err
		}
		data = make([]byte, n)
		_, err = v.ReadAt(data, off)
	default:
		p.view = nil
		err = v.Close()
	}
	return data, err
}

// process is the test's handle of a program's process.
type process struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	orders  *gob.Encoder
	answers *gob.Decoder
	open    int // brackets that were open at the last answer
}

func startProcess(env ...string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(exe)}
	p.cmd.Env = append(append(os.Environ(), programVariable+"=1", "GOMAXPROCS=2"), env...)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.orders, p.answers = gob.NewEncoder(p.stdin), gob.NewDecoder(out)
	return p, nil
}

func (p *process) do(o order) ([]byte, error) {
	if err := p.orders.Encode(o); err != nil {
		return nil, fmt.Errorf("the program is gone: %w", err)
	}
	var a answer
	if err := p.answers.Decode(&a); err != nil {
		return nil, fmt.Errorf("the program is gone: %w", err)
	}
	p.open = a.Open
	if a.Refused {
		return nil, model.ErrRefused
	}
	if a.Err != "" {
		return nil, errors.New(a.Err)
	}
	return a.Data, nil
}

// kill ends the process with SIGKILL.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = p.cmd.Wait() // it reports that the process was killed
	return nil
}

// end makes the process close everything and exit.
func (p *process) end() error {
	if err := p.stdin.Close(); err != nil {
		return err
	}
	return p.cmd.Wait()
}
