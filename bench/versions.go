package bench

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// versionCounts are the numbers of devices to measure: those of the thesis (6.1.1), and one.
var versionCounts = []int{1, 8, 32, 160}

// versionSize is the size of the file. Each of the many devices holds all of it, in the host's memory.
const versionSize = 2 << 20

// versionMount is a mount with that many emulated devices.
type versionMount struct {
	*place
	devices int
	// free is a file that no device has; mapped is one that all devices have.
	free, mapped *dataFile
}

// sideName names a mount by its number of devices.
func sideName(devices int) string {
	switch devices {
	case 0:
		return "no devices"
	case 1:
		return "1 device"
	}
	return fmt.Sprintf("%d devices", devices)
}

// versionRows measure the cost of the number of devices for CPU programs. Every request has 4 KiB and reaches the
// daemon: reads bypass the kernel's page cache.
func versionRows(_ context.Context, s *session) ([]rows.Row, error) {
	counts := versionCounts
	if s.Quick {
		counts = []int{1, 32, 160}
	}
	mounts := make(map[int]*versionMount)
	for _, n := range append([]int{0}, counts...) {
		m, err := s.versionMount(n)
		if err != nil {
			return nil, err
		}
		mounts[n] = m
	}
	var list []rows.Row
	for _, mapped := range []bool{false, true} {
		for _, write := range []bool{false, true} {
			for _, n := range counts {
				if s.Quick && n == 1 {
					continue
				}
				list = append(list, s.versionRow(mounts, n, write, mapped))
			}
		}
	}
	return list, nil
}

func (s *session) versionMount(devices int) (*versionMount, error) {
	gpus := "none"
	if devices > 0 {
		gpus = fmt.Sprintf("emulated:%d", devices)
	}
	// Without devices, files would pass through, and no request would reach the daemon.
	p, err := s.placeWith("gaiafs, "+sideName(devices), gpus, "--gpu-memory=64M", "--passthrough=off")
	if err != nil {
		return nil, err
	}
	m := &versionMount{place: p, devices: devices}
	if m.free, err = s.newFile("free.dat", versionSize, p); err == nil {
		m.mapped, err = s.newFile("mapped.dat", versionSize, p)
	}
	return m, err
}

// versionRow compares a mount with n devices with one without devices, or for a mapped file, with one that has one
// device.
func (s *session) versionRow(mounts map[int]*versionMount, n int, write, mapped bool) rows.Row {
	operation, what := "read", "not mapped"
	if write {
		operation = "write"
	}
	against := 0
	if mapped {
		what, against = "mapped by all", 1
	}
	r := rows.Row{Group: "versions", Name: fmt.Sprintf("%s 4 KiB, %s, %s", operation, what, sideName(n)),
		Unit:   rows.Microseconds,
		Rounds: 3 * s.Rounds, // short rounds: the differences are small, and rounds close together show them best
		Labels: map[string]string{"operation": operation, "mapped": strconv.FormatBool(mapped),
			"devices": strconv.Itoa(n)}}
	switch n {
	case 32: // met, or within the spread: not measurable
		r.Targets = []rows.Target{{Against: sideName(against), Limit: 1}}
	case 160:
		r.Targets = []rows.Target{{Against: sideName(against), Limit: 0.95}}
	}
	sides := []int{n, 0}
	if mapped && n > 1 {
		sides = append(sides, 1)
	}
	for _, k := range sides {
		m := mounts[k]
		r.Sides = append(r.Sides, rows.Side{Name: sideName(k),
			Prepare: func(context.Context) error { return m.seesRequests() },
			Measure: func(ctx context.Context) (float64, error) {
				return m.request(ctx, write, mapped, s.versionTime())
			},
			Check: func(context.Context) error { return m.agrees(mapped) },
		})
	}
	return r
}

// versionTime is the minimum duration of the measurement of a side.
func (s *session) versionTime() time.Duration {
	if s.Quick {
		return 20 * time.Millisecond
	}
	return 60 * time.Millisecond
}

// seesRequests fails if the measured requests would not reach the daemon.
func (m *versionMount) seesRequests() error {
	if err := m.describe(); err != nil {
		return err
	}
	if m.passes() {
		return fmt.Errorf("files of %s pass through, past the daemon", m.name)
	}
	return nil
}

// request returns the time of a request in µs: the median of passes over the file that take at least that long in
// total, so that a short disturbance does not count. Before each pass, the devices that have the file have an
// up-to-date copy.
func (m *versionMount) request(ctx context.Context, write, mapped bool, least time.Duration) (float64, error) {
	d := m.free
	if mapped {
		d = m.mapped
	}
	a := &access{write: write, random: true, block: pageSize, jobs: 1, size: d.size, amount: d.size,
		flags: unix.O_DIRECT}
	var passes []float64
	var took time.Duration
	begin := time.Now()
	for pass := uint64(0); took < least && (pass < 3 || time.Since(begin) < 5*least); pass++ {
		if mapped {
			if err := m.settle(d); err != nil {
				return 0, err
			}
		}
		t, err := a.run(ctx, m.path(d.name), pass)
		if err != nil {
			return 0, err
		}
		took += t
		passes = append(passes, us(t)*float64(a.block)/float64(a.bytes()))
	}
	return rows.Summarise(passes).Median, nil
}

// settle makes every device of the mount hold the file.
func (m *versionMount) settle(d *dataFile) error {
	for k := range m.devices {
		mapping, err := d.mapped(m.place, k)
		if err != nil {
			return err
		}
		if _, err := mapping.Acquire(0, mapping.Len()); err != nil {
			return err
		}
	}
	return nil
}

// agrees fails if the mount shows other bytes than the backing file has.
func (m *versionMount) agrees(mapped bool) error {
	d := m.free
	if mapped {
		d = m.mapped
	}
	return m.place.agrees(d)
}
