package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sameDevice reports whether two files are on one filesystem.
func sameDevice(a, b fs.FileInfo) bool {
	x, ok := a.Sys().(*syscall.Stat_t)
	y, ok2 := b.Sys().(*syscall.Stat_t)
	return ok && ok2 && x.Dev == y.Dev
}

// dropCaches writes a file to the disk and makes the kernel forget its bytes. If this process may, it also drops the
// machine's other caches: all reports whether it did.
func dropCaches(path string) (all bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := dropPages(f); err != nil {
		return false, err
	}
	err = os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		return false, nil
	}
	return err == nil, err
}

// dropPages writes a file to the disk and asks the kernel to forget its bytes.
func dropPages(f *os.File) error {
	return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// warmUp reads those of the first n bytes of a file that are not in the kernel's cache.
func warmUp(path string, n int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	p, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(p)
	return parallel(pieces(n), 0, func(i int) error {
		off, size := piece(i, n)
		held := make([]byte, (size+int64(os.Getpagesize())-1)/int64(os.Getpagesize()))
		if err := mincore(p[off:off+size], held); err != nil {
			return err
		}
		for _, h := range held {
			if h&1 == 0 {
				buf := make([]byte, 1<<20)
				for at := off; at < off+size; at += int64(len(buf)) {
					if _, err := f.ReadAt(buf[:min(int64(len(buf)), off+size-at)], at); err != nil {
						return err
					}
				}
				return nil
			}
		}
		return nil
	})
}

// readDirect reads n bytes of a file past the kernel's cache, several reads at a time, and returns how long that took.
func readDirect(path string, n int64) (time.Duration, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return 0, fmt.Errorf("%w; --dir must be on a filesystem with O_DIRECT", err)
	}
	defer f.Close()
	buffers := make(chan []byte, directReads)
	for range directReads {
		p, err := hostMemory(directRead)
		if err != nil {
			return 0, err
		}
		defer unix.Munmap(p)
		buffers <- p
	}
	start := time.Now()
	err = parallel(int((n+directRead-1)/directRead), directReads, func(i int) error {
		p := <-buffers
		defer func() { buffers <- p }()
		off := int64(i) * directRead
		got, err := unix.Pread(int(f.Fd()), p, off)
		if err == nil && int64(got) < min(directRead, n-off) {
			err = fmt.Errorf("%s: short read of %d bytes at %d", path, got, off)
		}
		return err
	})
	return time.Since(start), err
}

// Size of the reads, and how many of them run concurrently.
const (
	directRead  = 4 << 20
	directReads = 16
)
