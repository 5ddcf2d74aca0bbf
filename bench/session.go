package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// place is a directory to run a file workload in.
type place struct {
	// name is the side's name in the table.
	name string
	// source is the directory on the backing filesystem, dir the same directory as the workload sees it.
	source, dir string
}

func (p *place) path(names ...string) string {
	return filepath.Join(append([]string{p.dir}, names...)...)
}
func (p *place) home(names ...string) string {
	return filepath.Join(append([]string{p.source}, names...)...)
}

// session owns what a run makes: a directory on the backing filesystem, and the daemons that show parts of it.
type session struct {
	dir   string
	quick bool

	daemons []*daemon
	places  map[string]*place
	cleanup []func()
}

// newSession makes the session's directory in parent.
func newSession(parent string, quick bool) (*session, error) {
	dir, err := os.MkdirTemp(parent, "gaiafs-bench-")
	if err != nil {
		return nil, err
	}
	return &session{dir: dir, quick: quick, places: make(map[string]*place)}, nil
}

// close takes everything away. It may be called once.
func (s *session) close() error {
	s.endGroup()
	for _, d := range s.daemons {
		d.close()
	}
	for _, p := range s.places {
		var at, up unix.Stat_t
		if p.dir != p.source && unix.Stat(p.dir, &at) == nil && unix.Stat(filepath.Dir(p.dir), &up) == nil && at.Dev != up.Dev {
			return fmt.Errorf("%s is still mounted, so %s is left", p.dir, s.dir)
		}
	}
	return os.RemoveAll(s.dir)
}

// later has fn called when the group of rows that runs is over, or the session, and before the daemons end.
func (s *session) later(fn func()) { s.cleanup = append(s.cleanup, fn) }

// endGroup calls what later was given, the last first.
func (s *session) endGroup() {
	for i := len(s.cleanup) - 1; i >= 0; i-- {
		s.cleanup[i]()
	}
	s.cleanup = nil
}

// fill makes a file of n bytes, which do not compress or repeat within a MiB, and brings it to the disk.
func fill(path string, n int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	rnd := rand.NewChaCha8([32]byte{7})
	for at := int64(0); at < n; at += int64(len(block)) {
		_, _ = rnd.Read(block) // it never fails
		if _, err := f.Write(block[:min(int64(len(block)), n-at)]); err != nil {
			return err
		}
	}
	return f.Sync()
}

// Names of places.
const (
	placeGaiafs     = "gaiafs"
	placeLoopback   = "loopback"
	placeLoopback1M = "loopback-1M"
	placeBacking    = "backing"
)

// deviceMemory is the memory of each emulated device. It is taken only when used.
const deviceMemory = 3 << 30

// place returns the place of that name, mounting it when it is first asked for.
func (s *session) place(name string) (*place, error) {
	if p := s.places[name]; p != nil {
		return p, nil
	}
	p := &place{name: name, source: filepath.Join(s.dir, name)}
	p.dir = p.source
	if err := os.Mkdir(p.source, 0o755); err != nil {
		return nil, err
	}
	job := daemonJob{Source: p.source, Loopback: true}
	switch name {
	case placeBacking:
		s.places[name] = p
		return p, nil
	case placeLoopback1M:
		job.MaxWrite = 1 << 20
	case placeGaiafs:
		job = daemonJob{Source: p.source, Socket: filepath.Join(s.dir, "run", "socket"), Devices: 2, Memory: deviceMemory}
	}
	p.dir = filepath.Join(s.dir, "mnt-"+name)
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		return nil, err
	}
	job.Mountpoint = p.dir
	d, err := startDaemon(&job)
	if err != nil {
		return nil, err
	}
	s.daemons = append(s.daemons, d)
	s.places[name] = p
	return p, nil
}

// allPlaces returns gaiafs and what it is compared with.
func (s *session) allPlaces() ([]*place, error) {
	var all []*place
	for _, name := range []string{placeGaiafs, placeLoopback, placeLoopback1M, placeBacking} {
		p, err := s.place(name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// threePlaces is for workloads in which the size of requests does not matter.
func (s *session) threePlaces() ([]*place, error) {
	all, err := s.allPlaces()
	if err != nil {
		return nil, err
	}
	return []*place{all[0], all[1], all[3]}, nil
}

// dropCaches makes the files of a place cold: their pages are written and dropped on the mount and below it. Root drops the
// machine's caches of names and inodes as well.
func (p *place) dropCaches(files ...string) error {
	if err := p.dropFiles(files...); err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
	}
	return nil
}

// dropFiles is dropCaches for the pages of these files only.
func (p *place) dropFiles(files ...string) error {
	for _, name := range files {
		for _, path := range []string{p.path(name), p.home(name)} {
			if err := dropPages(path); err != nil {
				return err
			}
		}
	}
	return nil
}

func dropPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// warm reads a file on the mount from beginning to end.
func (p *place) warm(ctx context.Context, name string) error {
	f, err := os.Open(p.path(name))
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for ctx.Err() == nil {
		_, err := f.Read(buf)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}
