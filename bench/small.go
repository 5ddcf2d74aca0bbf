package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// Mounts of a data set of small files.
const (
	placeKernelOpens   = "--kernel-opens"
	placeReadOnly      = "--read-only"
	placeWritableOpens = "writable --kernel-opens"
	smallReaders       = 4
	smallSize          = 20 << 10
)

// smallRows read a data set of many small files, as data loaders do: several readers, each reading one file after
// another.
func smallRows(_ context.Context, s *session) ([]rows.Row, error) {
	if s.given != nil {
		return nil, nil
	}
	files := 8000
	if s.Quick {
		files = 1000
	}
	var places []*place
	for _, side := range []struct {
		name  string
		flags []string
	}{
		{placeKernelOpens, []string{"--read-only", "--kernel-opens"}},
		{placeReadOnly, []string{"--read-only", "--passthrough=off"}},
		{placeWritableOpens, []string{"--kernel-opens"}},
		{placeGaiafs, nil},
		{placeBacking, nil},
	} {
		p, err := s.placeWith(side.name, s.GPUs, side.flags...)
		if err != nil {
			return nil, err
		}
		places = append(places, p)
	}
	const perDir = 100
	name := func(i int) string {
		return filepath.Join("dataset", fmt.Sprintf("d%d", i/perDir), fmt.Sprintf("f%d", i%perDir))
	}
	content := bytes.Repeat([]byte("gaia"), smallSize/4)
	full := func(_ context.Context, p *place) error {
		for i := range files {
			path := p.home(name(i))
			if i == 0 {
				if _, err := os.Stat(p.home(name(files - 1))); err == nil {
					return nil
				}
			}
			if i%perDir == 0 {
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					return err
				}
			}
			if err := os.WriteFile(path, content, 0o644); err != nil {
				return err
			}
		}
		return nil
	}
	each := func(p *place, readers int, fn func(path string, buf []byte) error) (float64, error) {
		errs := make([]error, readers)
		var wg sync.WaitGroup
		start := time.Now()
		for r := range readers {
			wg.Go(func() {
				buf := make([]byte, smallSize)
				for i := r; i < files && errs[r] == nil; i += readers {
					errs[r] = fn(p.path(name(i)), buf)
				}
			})
		}
		wg.Wait()
		took := time.Since(start).Seconds()
		for _, err := range errs {
			if err != nil {
				return 0, err
			}
		}
		return float64(files) / took, nil
	}
	// Plain system calls, as programs in most languages make them. An os.File on a mount costs four more: files of FUSE
	// support poll, so Go adds each to its poller. Other filesystems refuse that at once.
	read := func(path string, buf []byte) error {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer unix.Close(fd)
		if n, err := unix.Read(fd, buf); n != smallSize {
			return fmt.Errorf("%s has %d bytes: %w", path, n, err)
		}
		return nil
	}
	stat := func(path string, _ []byte) error { _, err := os.Lstat(path); return err }
	warm := func(fn func(string, []byte) error) func(context.Context, *place) error {
		return func(ctx context.Context, p *place) error {
			if err := full(ctx, p); err != nil {
				return err
			}
			_, err := each(p, smallReaders, fn)
			return err
		}
	}
	cold := func(ctx context.Context, p *place) error {
		if err := full(ctx, p); err != nil {
			return err
		}
		return dropNames()
	}
	// listed first reads the names in the directories, which brings the attributes of all files to the kernel.
	listed := func(ctx context.Context, p *place) error {
		if err := cold(ctx, p); err != nil {
			return err
		}
		for i := 0; i < files; i += perDir {
			if _, err := os.ReadDir(filepath.Dir(p.path(name(i)))); err != nil {
				return err
			}
		}
		return nil
	}
	row := func(title string, prepare func(context.Context, *place) error, readers int,
		fn func(string, []byte) error) rows.Row {
		r := perPlace(title, rows.PerSecond, places, prepare, func(_ context.Context, p *place) (float64, error) {
			return each(p, readers, fn)
		})
		r.Group, r.Targets = "small", []rows.Target{{Against: placeBacking, Limit: 0.8}}
		return r
	}
	what := fmt.Sprintf("%d files of 20 KiB, ", files)
	return []rows.Row{
		row(what+"read by 4 readers, warm", warm(read), smallReaders, read),
		row(what+"read by 4 readers, cold names", cold, smallReaders, read),
		row(what+"read by 4 readers, cold after listing", listed, smallReaders, read),
		row(what+"stat, warm", warm(stat), 1, stat),
	}, nil
}
