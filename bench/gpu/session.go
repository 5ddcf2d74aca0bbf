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
	program  string // of gaiafs
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
	// emulated says that they are emulated devices.
	emulated bool
	// memory is what a mount has of each, 0 for what there is.
	memory int64
	mount  *mount
	check  *checker
	// size is that of the large file, call that of files of which programs acquire and release all: what was asked for,
	// or less where the GPUs are small.
	size, call int64
	// data is the large file.
	data *dataFile
	// What comparisons copy through, once they did.
	pageable []byte
	pipeline chan []byte
	cleanup  []func()
	before   func() // of endRow
}

// readWrite is the protection of mappings that kernels store into.
const readWrite = gaiafs.ProtRead | gaiafs.ProtWrite

// mountPatience is how long a daemon may take until its mount can be used.
const mountPatience = time.Minute

// newSession opens the GPUs and mounts. After an error nothing is left.
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

// leastFree returns what the fullest of the GPUs has free, before gaiafs takes something.
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

// fitting returns the sizes of files for a GPU of which gaiafs may use budget of the bytes that are free. The large one
// is there twice, by gaiafs and by what that is compared with; a smaller one is there three times while gaiafs may hold
// anything up to its budget. Contexts of other processes need some of the rest.
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
		return 0, 0, fmt.Errorf("a GPU has %s free, of which gaiafs may use %s: too little to measure anything with; "+
			"end other programs on it, or choose another one with --gpus", sizeText(free), sizeText(budget))
	}
	return size, call, nil
}

// close takes everything away. It may be called once.
func (s *session) close() error {
	s.endGroup()
	if s.mount != nil {
		s.mount.close()
		at, err := os.Stat(s.mount.dir)
		if up, upErr := os.Stat(s.dir); err == nil && upErr == nil && !sameDevice(at, up) {
			return fmt.Errorf("%s is still mounted, so %s is left", s.mount.dir, s.dir)
		}
	}
	return os.RemoveAll(s.dir)
}

// later has f called when the group of rows that runs is over, and before the daemon ends.
func (s *session) later(f func()) { s.cleanup = append(s.cleanup, f) }

// endGroup calls what later was given, the last first.
func (s *session) endGroup() {
	for i := len(s.cleanup) - 1; i >= 0; i-- {
		s.cleanup[i]()
	}
	s.cleanup, s.before = nil, nil
}

// dataFile returns the data file, making it when it is first asked for.
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

// paintedFile makes a file of n bytes on the backing filesystem, painted with seed 0, and another beside the mount.
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

// private is the path of a file beside the mount, for what gaiafs is compared with.
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
