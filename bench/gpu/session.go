package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"time"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// options are the command line.
type options struct {
	program  string // path of gaiafs
	gpus     string
	dir      string
	python   string
	size     int64
	large    int64
	runs     int
	time     time.Duration
	rows     string
	match    *regexp.Regexp
	json     string
	markdown string
}

// session owns what a run makes.
type session struct {
	options
	dir  string // of this run, on the backing filesystem
	gpus []gpu
	// emulated says that the devices are emulated.
	emulated bool
	// memory is the budget of each device, 0 for the default.
	memory int64
	mount  *mount
	check  *checker
	// size is the size of the large file. call is that of files which programs acquire and release as a whole. Both are
	// as asked for, or less if the GPUs are small.
	size, call int64
	// data is the large file.
	data *dataFile
	// Buffers of the other sides, made on first use.
	pageable []byte
	pipeline chan []byte
	cleanup  []func()
	before   func() // set by endRow
}

// readWrite is the protection of mappings that kernels store into.
const readWrite = gaiafs.ProtRead | gaiafs.ProtWrite

// mountPatience is how long a daemon may take until its mount is usable.
const mountPatience = time.Minute

// newSession opens the GPUs and mounts. After an error, nothing is left.
func newSession(ctx context.Context, o options) (s *session, err error) {
	choice, err := parseDevices(o.gpus)
	if err != nil {
		return nil, fmt.Errorf("--gpus: %w", err)
	}
	s = &session{options: o}
	if s.gpus, err = choice.open(); err != nil {
		return nil, err
	}
	if s.dir, err = os.MkdirTemp(o.dir, "gaiafs-gpu-bench-"); err != nil {
		return nil, err
	}
	free, err := s.leastFree()
	if err != nil {
		return s, errors.Join(err, s.close())
	}
	made := s
	defer func() {
		if err != nil {
			err = errors.Join(err, made.close())
		}
	}()
	if s.emulated = choice.emulated; s.emulated {
		s.memory = 3*o.size + 1<<30
	}
	ready, cancel := context.WithTimeout(ctx, mountPatience)
	defer cancel()
	if s.mount, err = startMount(ready, o.program, s.dir, o.gpus, s.memory); err != nil {
		return nil, err
	}
	status, err := s.mount.status()
	if err != nil {
		return s, err
	}
	budget := status.Devices[0].Memory
	for _, d := range status.Devices {
		budget = min(budget, d.Memory)
	}
	if s.size, s.call = o.size, min(o.size, callSize); !choice.emulated {
		if s.size, s.call, err = fitting(o.size, free, budget); err != nil {
			return s, err
		}
	}
	s.check, err = newChecker(s.gpus[0], min(16, max(pieces(s.size), 2)))
	return s, err
}

// leastFree returns how many bytes are free on the fullest GPU, before gaiafs uses any.
func (s *session) leastFree() (least int64, err error) {
	for i, g := range s.gpus {
		n, err := g.freeMemory()
		if err != nil {
			return 0, err
		}
		if i == 0 || n < least {
			least = n
		}
	}
	return least, nil
}

// fitting returns the sizes of files for a GPU with so many free bytes, of which gaiafs may use budget. The large file
// is on the GPU twice: for gaiafs and for the other side. A smaller file is there three times, while gaiafs may hold
// other bytes up to its budget. The rest is also for contexts of other processes.
func fitting(want, free, budget int64) (size, call int64, err error) {
	size = min(want, budget/20*19, free/5*2)
	call = min(size, callSize, (free-budget)/4)
	if size < want {
		size &^= pieceSize - 1
	}
	if call < min(want, callSize) {
		call &^= 1<<20 - 1
	}
	if min(size, call) < 2*headerSize {
		return 0, 0, fmt.Errorf("a GPU has %s free, of which gaiafs may use %s: too little to measure; "+
			"end other programs on it, or choose another one with --gpus", sizeText(free), sizeText(budget))
	}
	return size, call, nil
}

// close removes everything. Call it at most once.
func (s *session) close() error {
	s.endGroup()
	if s.mount != nil {
		s.mount.close()
		at, err := os.Stat(s.mount.dir)
		if up, upErr := os.Stat(s.dir); err == nil && upErr == nil && !sameDevice(at, up) {
			return fmt.Errorf("%s is still mounted, so %s stays", s.mount.dir, s.dir)
		}
	}
	return os.RemoveAll(s.dir)
}

// later arranges for f to be called when the present group of rows is over, before the daemon ends.
func (s *session) later(f func()) { s.cleanup = append(s.cleanup, f) }

// endGroup calls the functions of later, the last one first.
func (s *session) endGroup() {
	for i := len(s.cleanup) - 1; i >= 0; i-- {
		s.cleanup[i]()
	}
	s.cleanup, s.before = nil, nil
}

// dataFile returns the data file, and makes it on first use.
func (s *session) dataFile() (*dataFile, error) {
	if s.data != nil {
		return s.data, nil
	}
	const name = "data.safetensors"
	d, err := makeData(s.mount.home(name), name, s.size)
	if err != nil {
		return nil, err
	}
	s.data = d
	return d, nil
}

// paintedFile makes a file of n bytes on the backing filesystem, painted with seed 0, and another one outside the
// mount.
func (s *session) paintedFile(name string, n int64) error {
	for _, path := range []string{s.mount.home(name), s.private(name)} {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		err = parallel(pieces(n), 0, func(i int) error {
			off, size := piece(i, n)
			p := make([]byte, size)
			stripes{size: n, width: n, writers: 1}.store(off, p)
			_, err := f.WriteAt(p, off)
			return err
		})
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	s.later(func() {
		_ = os.Remove(s.mount.path(name))
		_ = os.Remove(s.private(name))
	})
	return nil
}

// private returns the path of a file outside the mount, for the other sides.
func (s *session) private(name string) string { return s.dir + "/private-" + name }

// opened opens a file of the mount until the group ends.
func (s *session) opened(name string) (*os.File, error) {
	f, err := s.mount.open(name)
	if err == nil {
		s.later(func() { _ = f.Close() })
	}
	return f, err
}

// mapped maps n bytes of a file until the group ends.
func (s *session) mapped(name string, n int64, prot gaiafs.Prot, g gpu,
	options ...gaiafs.Option) (*gaiafs.Mapping, error) {
	m, err := s.mount.mapFile(name, 0, n, prot, g.device(), options...)
	if err == nil {
		s.later(func() { _ = m.Close() })
	}
	return m, err
}

// room allocates n bytes on a GPU until the group ends.
func (s *session) room(g gpu, n int64) (address, error) {
	a, err := g.alloc(n)
	if err == nil {
		s.later(func() { _ = g.free(a) })
	}
	return a, err
}
