package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/rundir"

	"github.com/gaiafs/gaiafs/bench/loopback"
	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// place is a directory in which a file workload runs.
type place struct {
	// name is the side's name in the table.
	name string
	// source is the directory on the backing filesystem; dir is the same directory as the workload sees it.
	source, dir string
	// mount and devices are what gaiafs reported when it was mounted; nil if gaiafs does not serve the place.
	mount   *rows.Mount
	devices []string
}

// passes reports whether the kernel reads and writes the backing files of this mount itself, past the daemon.
func (p *place) passes() bool { return p.mount != nil && p.mount.Passthrough }

func (p *place) path(names ...string) string {
	return filepath.Join(append([]string{p.dir}, names...)...)
}
func (p *place) home(names ...string) string {
	return filepath.Join(append([]string{p.source}, names...)...)
}

// session owns everything that a run makes: a directory on the backing filesystem, and the daemons that show parts of
// it.
type session struct {
	Options
	// dir is the session's directory in Dir. mounts is the directory for mountpoints, usually the same.
	dir, mounts string
	made        []*rundir.Dir
	// given is the user's file, or nil.
	given *dataFile
	// cold says why files cannot be made cold here, or "" if they can.
	cold string
	// remarks are printed before the measurements.
	remarks []string
	// failed counts failed rows.
	failed int
	// listing says that rows are made only for their names.
	listing bool

	daemons []*daemon
	places  map[string]*place
	mounted []*place // places of gaiafs, in order
	cleanup []func()
}

// newSession makes the session's directory.
func newSession(o Options) (*session, error) {
	s := &session{Options: o, places: make(map[string]*place)}
	dir, err := s.makeDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("%w; choose another folder with --dir", err)
	}
	s.dir, s.mounts = dir, dir
	return s, nil
}

// makeDir makes a directory for the session, and removes what killed benches left there.
func (s *session) makeDir(parent string) (string, error) {
	const prefix = "gaiafs-bench-"
	for _, dir := range rundir.Sweep(parent, prefix) {
		s.remarks = append(s.remarks, dir+" was left by a killed bench and is removed")
	}
	d, err := rundir.Make(parent, prefix)
	if err != nil {
		return "", err
	}
	s.made = append(s.made, d)
	return d.Path, nil
}

// newListing returns a session in which rows are made only for their names. It pretends that everything they need
// exists, and makes nothing. The rows must not be run.
func newListing(o Options) *session {
	s := &session{Options: o, listing: true, places: make(map[string]*place)}
	if o.File != "" {
		s.given = &dataFile{name: filepath.Base(o.File), size: mostOfFile, whole: mostOfFile}
	}
	return s
}

// leaveFolder makes mountpoints outside a folder that is to be mounted: it cannot contain them.
func (s *session) leaveFolder(folder string) error {
	real, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return err
	}
	for _, parent := range []string{s.dir, os.TempDir(), os.Getenv("XDG_RUNTIME_DIR"), "/run", "/var/tmp", "/dev/shm"} {
		if parent, err = filepath.EvalSymlinks(parent); err != nil {
			continue
		}
		if rel, err := filepath.Rel(real, parent); err != nil || !strings.HasPrefix(rel, "..") {
			continue
		}
		if parent == s.dir {
			return nil
		}
		if s.mounts, err = s.makeDir(parent); err == nil {
			return nil
		}
		s.mounts = s.dir
	}
	return fmt.Errorf("there is nowhere to mount outside of %s: move the file to a separate folder", folder)
}

// prepare checks what the run will need.
func (s *session) prepare(wanted []*group) (err error) {
	if s.File != "" {
		// A link may lead out of the mounted folder, past the mount.
		file, err := filepath.EvalSymlinks(s.File)
		if err != nil {
			var why *os.PathError // it names a call, and the part of the path that failed
			if errors.As(err, &why) {
				err = why.Err
			}
			return fmt.Errorf("%s cannot be read: %w", s.File, err)
		}
		s.File = file
		if s.given, err = s.give(); err != nil {
			return err
		}
		if err := s.leaveFolder(filepath.Dir(s.File)); err != nil {
			return err
		}
		if s.given.size < s.given.whole {
			s.remarks = append(s.remarks, fmt.Sprintf("only the first part of %s is read: %s", s.File,
				humanize.IBytes(uint64(s.given.size))))
		}
	} else if err := s.checkRoom(wanted); err != nil {
		return err
	}
	switch kind, _ := rows.Filesystem(s.backingDir()); kind {
	case "tmpfs", "ramfs", "devtmpfs":
		what := "--dir " + s.Dir
		if s.given != nil {
			what = s.File
		}
		s.cold = fmt.Sprintf("%s is on %s, where files are always in host memory: choose a folder on a disk", what,
			kind)
		s.remarks = append(s.remarks, s.cold+"; rows about a cold cache are left out")
	}
	if os.Geteuid() != 0 {
		s.remarks = append(s.remarks, notRoot+"; rows about cold names are left out")
	}
	return nil
}

// checkRoom fails if the files of a group do not fit.
func (s *session) checkRoom(wanted []*group) error {
	var need int64
	for _, g := range wanted {
		mib := g.room
		if s.Quick {
			mib = g.quickRoom
		}
		need = max(need, mib<<20)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("%s has %s of free space and %s are needed: choose another folder with --dir, use less with --quick, or fewer groups with --run",
			s.Dir, humanize.IBytes(uint64(max(free, 0))), humanize.IBytes(uint64(need)))
	}
	return nil
}

// backingDir returns the directory of the measured files.
func (s *session) backingDir() string {
	if s.given != nil {
		return filepath.Dir(s.File)
	}
	return s.dir
}

// close removes everything. Call it at most once.
func (s *session) close() error {
	s.endGroup()
	for i := len(s.daemons) - 1; i >= 0; i-- {
		s.daemons[i].close()
	}
	for _, p := range s.places {
		var at, up unix.Stat_t
		if p.dir != p.source && unix.Stat(p.dir, &at) == nil && unix.Stat(filepath.Dir(p.dir), &up) == nil &&
			at.Dev != up.Dev {
			return fmt.Errorf("%s is still mounted, so %s stays", p.dir, s.dir)
		}
	}
	var errs []error
	for _, d := range s.made {
		errs = append(errs, d.Remove())
	}
	return errors.Join(errs...)
}

// later arranges for fn to be called when the present group of rows or the session ends, before the daemons end.
func (s *session) later(fn func()) {
	if !s.listing { // a listing has nothing to remove
		s.cleanup = append(s.cleanup, fn)
	}
}

// endGroup calls the functions of later, the last one first.
func (s *session) endGroup() {
	for i := len(s.cleanup) - 1; i >= 0; i-- {
		s.cleanup[i]()
	}
	s.cleanup = nil
}

// Names of places.
const (
	placeGaiafs     = "gaiafs"
	placeWriteBack  = "gaiafs --write-back"
	placeLoopback   = "loopback"
	placeLoopback1M = "loopback-1M"
	placeBacking    = "backing"
	// placeSlow is a loopback with slow writes, and placeOnSlow a mount of gaiafs on top of it.
	placeSlow   = "slow disk"
	placeOnSlow = "gaiafs on a slow disk"
)

// place returns the place of that name, and mounts it on first use. Each place has its own directory; but if there is a
// user's file, all places show its directory.
func (s *session) place(name string) (*place, error) {
	return s.placeWith(name, s.GPUs)
}

// placeWith is place for a mount of gaiafs with these devices.
func (s *session) placeWith(name, gpus string, flags ...string) (*place, error) {
	if p := s.places[name]; p != nil {
		return p, nil
	}
	p := &place{name: name}
	if s.listing {
		return p, nil
	}
	var disk *place
	if name == placeOnSlow {
		var err error
		if disk, err = s.place(placeSlow); err != nil {
			return nil, err
		}
	}
	word := fmt.Sprintf("%d", len(s.places)) // short, because a socket may be made there
	if p.source = filepath.Join(s.dir, word); s.given != nil {
		p.source = filepath.Dir(s.File)
	} else if disk != nil {
		p.source = disk.dir
	} else if err := os.Mkdir(p.source, 0o755); err != nil {
		return nil, err
	}
	if name == placeBacking {
		p.dir = p.source
		s.places[name] = p
		return p, nil
	}
	p.dir = filepath.Join(s.mounts, "mnt-"+word)
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		return nil, err
	}
	d, err := s.serve(p, gpus, flags)
	if err != nil {
		return nil, err
	}
	s.daemons = append(s.daemons, d)
	if p.mount != nil {
		if err := p.describe(); err != nil {
			return nil, err
		}
		s.mounted = append(s.mounted, p)
	}
	s.places[name] = p
	return p, nil
}

// serve starts the daemon of a place.
func (s *session) serve(p *place, gpus string, flags []string) (*daemon, error) {
	readOnly := s.given != nil
	switch p.name {
	case placeLoopback:
		return s.startLoopback(loopback.Options{ReadOnly: readOnly}, p.source, p.dir)
	case placeLoopback1M:
		return s.startLoopback(loopback.Options{ReadOnly: readOnly, MaxWrite: 1 << 20}, p.source, p.dir)
	case placeSlow:
		return s.startLoopback(loopback.Options{SlowWrites: slowWrite}, p.source, p.dir)
	case placeWriteBack:
		flags = append(flags, "--write-back")
	}
	if readOnly {
		// Read-only mounts pass through, and that would compare the kernel with itself.
		flags = append(flags, "--read-only", "--passthrough=off")
	}
	p.mount = &rows.Mount{Side: p.name, GPUs: gpus, Flags: flags}
	return s.startGaiafs(p.source, p.dir, append([]string{"--gpus=" + gpus}, flags...)...)
}

// placesNamed returns several places.
func (s *session) placesNamed(names ...string) ([]*place, error) {
	var all []*place
	for _, name := range names {
		p, err := s.place(name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// threePlaces are for workloads that do not depend on the size of requests.
func (s *session) threePlaces() ([]*place, error) {
	return s.placesNamed(placeGaiafs, placeLoopback, placeBacking)
}

// mountStatus is the part of docs/status.md that rows use.
type mountStatus struct {
	Mount struct {
		Passthrough bool `json:"passthrough"`
	} `json:"mount"`
	Devices []struct {
		Device int    `json:"device"`
		Kind   string `json:"kind"`
		Name   string `json:"name"`
		Memory int64  `json:"memory_bytes"`
		UUID   string `json:"uuid"`
	} `json:"devices"`
	Files []struct {
		Name    string `json:"name"`
		Holders []struct {
			Device   int   `json:"device"`
			Resident int64 `json:"resident_pages"`
			Stale    int64 `json:"stale_pages"`
		} `json:"holders"`
	} `json:"files"`
	Counters map[string]int64 `json:"counters"`
}

func (p *place) status() (st mountStatus, err error) {
	text, err := gaiafs.Status(p.dir)
	if err != nil {
		return st, err
	}
	return st, json.Unmarshal(text, &st)
}

// describe asks a mount of gaiafs for its status.
func (p *place) describe() error {
	st, err := p.status()
	if err != nil {
		return fmt.Errorf("the status of %s cannot be read: %w", p.dir, err)
	}
	p.mount.Passthrough = st.Mount.Passthrough
	p.devices = nil
	for _, d := range st.Devices {
		p.devices = append(p.devices, fmt.Sprintf("device %d: %s, %s, %s", d.Device, d.Kind, d.Name,
			humanize.IBytes(uint64(d.Memory))))
	}
	return nil
}

// describeMounts adds the mounts of this run to a report, and the devices that --gpus gave.
func (s *session) describeMounts(r *rows.Report) {
	r.Mounts = nil
	for _, p := range s.mounted {
		r.Mounts = append(r.Mounts, *p.mount)
		if p.name == placeGaiafs {
			r.Machine.Devices = p.devices
		}
	}
}

// needDevices returns rows.Impossible if the mount has fewer than n devices.
func (s *session) needDevices(p *place, n int) error {
	if s.listing {
		return nil
	}
	st, err := p.status()
	if err != nil {
		return err
	}
	if len(st.Devices) < n {
		return rows.Impossible{Reason: fmt.Sprintf("--gpus %s gives %d devices and %d are needed", s.GPUs,
			len(st.Devices), n)}
	}
	return nil
}

// emulated reports whether the devices of a mount are emulated, so that the CPU can address their memory.
func (s *session) emulated(p *place) bool {
	if s.listing {
		return true
	}
	st, err := p.status()
	for _, d := range st.Devices {
		if d.Kind != "emulated" {
			return false
		}
	}
	return err == nil && len(st.Devices) > 0
}

// isFull reports whether mapping failed because the device has no memory.
func isFull(err error) bool { return errors.Is(err, unix.ENOMEM) }
