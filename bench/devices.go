package bench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const pageSize = 4096

// deviceFile is a file that devices map, and the mappings that rows share.
type deviceFile struct {
	session *session
	place   *place
	name    string
	size    int64

	mappings map[mappingKey]*gaiafs.Mapping
	round    byte
}

type mappingKey struct {
	device   int
	writable bool
}

const readWrite = gaiafs.ProtRead | gaiafs.ProtWrite

// open opens the file on the mount.
func (d *deviceFile) open() (*os.File, error) { return os.OpenFile(d.place.path(d.name), os.O_RDWR, 0) }

// mapping returns a mapping of the whole file that stays until the group ends.
func (d *deviceFile) mapping(device int, writable bool) (*gaiafs.Mapping, error) {
	key := mappingKey{device, writable}
	if m := d.mappings[key]; m != nil {
		return m, nil
	}
	prot := gaiafs.ProtRead
	if writable {
		prot = readWrite
	}
	m, err := d.mapAnew(prot, device)
	if err == nil {
		d.mappings[key] = m
	}
	return m, err
}

func (d *deviceFile) mapAnew(prot gaiafs.Prot, device int) (*gaiafs.Mapping, error) {
	f, err := d.open()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return gaiafs.Map(f, 0, d.size, prot, device, gaiafs.Stays())
}

func (d *deviceFile) close() {
	for _, m := range d.mappings {
		_ = m.Close()
	}
	clear(d.mappings)
}

// forget makes the device evict the file. No mapping of the file may exist.
func (d *deviceFile) forget(device int) error {
	f, err := d.open()
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := gaiafs.Map(f, 0, d.size, gaiafs.ProtRead, device, gaiafs.Lazy(), gaiafs.Stays())
	if err != nil {
		return err
	}
	if err := m.Advise(0, d.size, gaiafs.AdviceDontNeed); err != nil {
		_ = m.Close()
		return err
	}
	return m.Close()
}

// modify changes a byte in one page of a hundred.
func (d *deviceFile) modify(m *gaiafs.Mapping) error {
	d.round++
	for at := int64(0); at < m.Len(); at += 100 * pageSize {
		if _, err := m.WriteAt([]byte{d.round}, at); err != nil {
			return err
		}
	}
	return nil
}

func deviceRows(_ context.Context, s *session) ([]rows.Row, error) {
	p, err := s.place(placeGaiafs)
	if err != nil {
		return nil, err
	}
	if err := s.needDevices(p, 1); err != nil {
		return nil, err
	}
	backing, err := s.place(placeBacking)
	if err != nil {
		return nil, err
	}
	d := &deviceFile{session: s, place: p, name: "device.dat", size: 1 << 30,
		mappings: make(map[mappingKey]*gaiafs.Mapping)}
	if s.Quick {
		d.size = 256 << 20
	}
	for _, dir := range []*place{p, backing} {
		if _, err := s.fill(dir.home(d.name), d.size); err != nil {
			return nil, err
		}
	}
	s.later(func() {
		d.close()
		_ = os.Remove(p.path(d.name))
		_ = os.Remove(backing.path(d.name))
	})
	size := fmt.Sprintf("%d MiB", d.size>>20)
	list := []rows.Row{d.mapRow("gaia_mmap cold, "+size, backing, cold),
		d.mapRow("gaia_mmap warm, "+size, backing, hostWarm)}
	list = append(list, d.secondMapRow("second gaia_mmap, another process, "+size))
	return append(list, d.callRows(size, s.emulated(p))...), nil
}

// mapRow compares bringing the file onto a device with reading it into a buffer.
func (d *deviceFile) mapRow(name string, backing *place, st state) rows.Row {
	prepare := func(p *place) func(context.Context) error {
		return func(ctx context.Context) error {
			d.close()
			if err := d.forget(0); err != nil {
				return err
			}
			return d.session.enter(ctx, st, p, &dataFile{name: d.name, size: d.size})
		}
	}
	rate := func(took time.Duration) float64 { return float64(d.size) / 1e6 / took.Seconds() }
	read := func(p *place) func(context.Context) (float64, error) {
		return func(context.Context) (float64, error) {
			took, err := readInto(p.path(d.name), d.size)
			return rate(took), err
		}
	}
	return rows.Row{Group: "device", Name: name, Unit: rows.MBPerSecond, Sides: []rows.Side{
		{Name: "gaia_mmap", Prepare: prepare(d.place), Measure: func(context.Context) (float64, error) {
			f, err := d.open()
			if err != nil {
				return 0, err
			}
			defer f.Close()
			start := time.Now()
			m, err := gaiafs.Map(f, 0, d.size, gaiafs.ProtRead, 0, gaiafs.Stays())
			took := time.Since(start)
			if err != nil {
				return 0, err
			}
			return rate(took), m.Close()
		}},
		{Name: "read(2) on gaiafs", Prepare: prepare(d.place), Measure: read(d.place)},
		{Name: "read(2) on backing", Prepare: prepare(backing), Measure: read(backing)},
	}}
}

// readInto reads a file into fresh memory, a MiB at a time.
func readInto(path string, n int64) (time.Duration, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	start := time.Now()
	buf, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, err
	}
	for at := 0; at < len(buf) && err == nil; at += 1 << 20 {
		_, err = io.ReadFull(f, buf[at:min(at+1<<20, len(buf))])
	}
	took := time.Since(start)
	if unmapErr := unix.Munmap(buf); err == nil {
		err = unmapErr
	}
	return took, err
}

// secondMapRow measures what a second process pays for a file that the device already has.
func (d *deviceFile) secondMapRow(name string) rows.Row {
	var moved int64
	return rows.Row{
		Group: "device", Name: name, Unit: rows.Milliseconds,
		Sides: []rows.Side{{Name: "gaiafs",
			Prepare: func(context.Context) error { _, err := d.mapping(0, false); return err },
			Measure: func(ctx context.Context) (float64, error) {
				before, err := d.place.filledPages()
				if err != nil {
					return 0, err
				}
				took, err := d.session.mapInProcess(ctx, d.place.path(d.name), d.size)
				if err != nil {
					return 0, err
				}
				after, err := d.place.filledPages()
				moved += (after - before) * pageSize
				return ms(took), err
			},
		}},
		Note: func() string { return fmt.Sprintf("%d bytes moved", moved) },
	}
}

// filledPages returns how many pages the mount brought to devices so far.
func (p *place) filledPages() (int64, error) {
	st, err := p.status()
	c := st.Counters
	return c["filled_pages"] + c["refreshed_pages"] + c["patched_pages"], err
}

// callRows measure acquire and release on a mapping of the whole file.
func (d *deviceFile) callRows(size string, emulatedDevices bool) []rows.Row {
	// timed measures one call on a mapping.
	timed := func(device int, writable bool,
		call func(m *gaiafs.Mapping) error) func(context.Context) (float64, error) {
		return func(context.Context) (float64, error) {
			m, err := d.mapping(device, writable)
			if err != nil {
				return 0, err
			}
			start := time.Now()
			err = call(m)
			return ms(time.Since(start)), err
		}
	}
	acquire := func(m *gaiafs.Mapping) error { _, err := m.Acquire(0, d.size); return err }
	release := func(m *gaiafs.Mapping) error { _, err := m.Release(0, d.size); return err }
	// settle makes the mapping and brings it up to date.
	settle := func(device int, writable bool) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := timed(device, writable, acquire)(ctx)
			return err
		}
	}
	modified := func(ctx context.Context) error {
		if err := settle(0, true)(ctx); err != nil {
			return err
		}
		return d.modify(d.mappings[mappingKey{0, true}])
	}
	pass := rows.Row{Group: "device", Name: "mrelease, writable, nothing changed, " + size, Unit: rows.Milliseconds,
		Sides: []rows.Side{{Name: "gaiafs", Prepare: settle(0, true), Measure: timed(0, true, release)}}}
	if emulatedDevices {
		pass.Targets = []rows.Target{{Against: "read pass", Limit: 1 / 1.5}}
		pass.Sides = append(pass.Sides, rows.Side{Name: "read pass", Prepare: settle(0, true),
			Measure: timed(0, true, func(m *gaiafs.Mapping) error {
				readPass(m.Bytes())
				return nil
			})})
	}
	other := rows.Row{Group: "device", Name: "macquire by another device, 1 % of the pages changed, " + size,
		Unit: rows.Milliseconds}
	if err := d.session.needDevices(d.place, 2); err != nil {
		other.Skip = err.Error()
	}
	other.Sides = []rows.Side{{Name: "gaiafs",
		Prepare: func(ctx context.Context) error {
			if err := settle(1, true)(ctx); err != nil {
				return err
			}
			if err := modified(ctx); err != nil {
				return err
			}
			_, err := timed(0, true, release)(ctx)
			return err
		},
		Measure: timed(1, true, acquire)}}
	return []rows.Row{
		{Group: "device", Name: "macquire, nothing changed, " + size, Unit: rows.Milliseconds,
			Targets: []rows.Target{{Limit: 1}},
			Sides:   []rows.Side{{Name: "gaiafs", Prepare: settle(0, true), Measure: timed(0, true, acquire)}}},
		{Group: "device", Name: "mrelease, read-only, " + size, Unit: rows.Milliseconds,
			Targets: []rows.Target{{Limit: 1}},
			Sides:   []rows.Side{{Name: "gaiafs", Prepare: settle(0, false), Measure: timed(0, false, release)}}},
		pass,
		{Group: "device", Name: "mrelease, 1 % of the pages changed, " + size, Unit: rows.Milliseconds,
			Sides: []rows.Side{{Name: "gaiafs", Prepare: modified, Measure: timed(0, true, release)}}},
		other,
	}
}

// readPass loads every byte of p once, on as many goroutines as there are processors.
func readPass(p []byte) {
	workers := runtime.GOMAXPROCS(0)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { bytes.Count(p[len(p)*w/workers:len(p)*(w+1)/workers], []byte{0}) })
	}
	wg.Wait()
}
