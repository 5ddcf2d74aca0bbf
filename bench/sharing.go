package bench

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// strided is a file that a CPU program and a device write at once, each in every other stride.
type strided struct {
	path    string // on the mount
	private string // on the backing filesystem, for comparison
	size    int
	stride  int

	value byte // what the CPU stores this time; the device stores its complement
	lost  *int64

	device *gaiafs.Mapping
	cpu    []byte // of path, shared
	file   *os.File
	read   []byte // a read of the result
}

func sharingRows(_ context.Context, s *session) ([]rows.Row, error) {
	p, err := s.place(placeGaiafs)
	if err != nil {
		return nil, err
	}
	if err := s.needDevices(p, 1); err != nil {
		return nil, err
	}
	if !s.emulated(p) {
		return nil, rows.Impossible{Reason: "gpu-bench, in the GPU bundle, measures programs that store on GPUs; use --gpus emulated:2 here"}
	}
	backing, err := s.place(placeBacking)
	if err != nil {
		return nil, err
	}
	large := 64 << 20
	if s.Quick {
		large = 8 << 20
	}
	var lost, written int64
	var list []rows.Row
	for _, size := range []int{pageSize, large} {
		for _, stride := range []int{1, 8, 64, 4096} {
			if size <= stride {
				continue
			}
			x := &strided{size: size, stride: stride, lost: &lost}
			name := fmt.Sprintf("shared-%d-%d", size, stride)
			x.path, x.private = p.path(name), backing.path(name)
			for _, path := range []string{p.home(name), x.private} {
				if _, err := s.fill(path, int64(size)); err != nil {
					return nil, err
				}
			}
			s.later(x.close)
			list = append(list, rows.Row{
				Group: "sharing", Name: fmt.Sprintf("%d KiB, strides of %d B", size>>10, stride),
				Unit: rows.Milliseconds,
				Sides: []rows.Side{
					{Name: "gaiafs", Prepare: x.prepare, Measure: func(context.Context) (float64, error) {
						written += int64(size)
						return x.shared()
					}},
					{Name: "private buffers", Measure: func(context.Context) (float64, error) { return x.privately() }},
				},
			})
		}
	}
	return append(list, rows.Row{
		Group: "sharing", Name: "lost updates", Unit: rows.Count, Rounds: 1, Targets: []rows.Target{{Limit: 0}},
		Sides: []rows.Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
			return float64(lost),
				nil
		}}},
		Note: func() string { return fmt.Sprintf("of %d bytes", written) },
	}), nil
}

// prepare maps the file on both sides and brings the device up to date.
func (x *strided) prepare(context.Context) (err error) {
	if x.file == nil {
		if x.file, err = os.OpenFile(x.path, os.O_RDWR, 0); err != nil {
			return err
		}
		x.cpu, err = unix.Mmap(int(x.file.Fd()), 0, x.size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		if x.device, err = gaiafs.Map(x.file, 0, int64(x.size), readWrite, 0, gaiafs.Stays()); err != nil {
			return err
		}
		x.read = make([]byte, x.size)
	}
	x.value++
	_, err = x.device.Acquire(0, int64(x.size))
	return err
}

func (x *strided) close() {
	if x.device != nil {
		_ = x.device.Close()
	}
	if x.cpu != nil {
		_ = unix.Munmap(x.cpu)
	}
	if x.file != nil {
		_ = x.file.Close()
	}
	_ = os.Remove(x.path)
	_ = os.Remove(x.private)
}

// store writes every other stride of p, beginning with stride first.
func (x *strided) store(p []byte, first int, value byte) {
	for at := first * x.stride; at < len(p); at += 2 * x.stride {
		part := p[at:min(at+x.stride, len(p))]
		for i := range part {
			part[i] = value
		}
	}
}

// shared makes both write the file at once. It ends when a read shows everything.
func (x *strided) shared() (float64, error) {
	start := time.Now()
	var wg sync.WaitGroup
	var err error
	wg.Go(func() { x.store(x.cpu, 0, x.value) })
	wg.Go(func() {
		x.store(x.device.Bytes(), 1, ^x.value)
		_, err = x.device.Release(0, int64(x.size))
	})
	wg.Wait()
	if err != nil {
		return 0, err
	}
	if _, err := x.file.ReadAt(x.read, 0); err != nil {
		return 0, err
	}
	took := time.Since(start)
	x.check()
	return ms(took), nil
}

// check counts the bytes that neither of the two stored.
func (x *strided) check() {
	for i, b := range x.read {
		want := x.value
		if i/x.stride%2 == 1 {
			want = ^want
		}
		if b != want {
			*x.lost++
		}
	}
}

// privately makes both write private memory, merges by hand, writes the file and reads it.
func (x *strided) privately() (float64, error) {
	f, err := os.OpenFile(x.private, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	start := time.Now()
	a, b := make([]byte, x.size), make([]byte, x.size)
	var wg sync.WaitGroup
	wg.Go(func() { x.store(a, 0, x.value) })
	wg.Go(func() { x.store(b, 1, ^x.value) })
	wg.Wait()
	for at := x.stride; at < x.size; at += 2 * x.stride {
		copy(a[at:min(at+x.stride, x.size)], b[at:])
	}
	if _, err := f.WriteAt(a, 0); err != nil {
		return 0, err
	}
	if _, err := f.ReadAt(b, 0); err != nil {
		return 0, err
	}
	return ms(time.Since(start)), nil
}
