package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// access is a workload of bench itself: each of several jobs goes once through a part of a file.
type access struct {
	write, random bool
	// shared makes the jobs threads of one program that read through one descriptor.
	shared bool
	block  int64
	jobs   int
	// size is the size of the file; amount is how many bytes of it all jobs together go through.
	size, amount int64
	// flags are flags of open(2), besides the access mode.
	flags int
	// verify, if not nil, is called with the bytes that were read from off.
	verify func(p []byte, off int64) error
}

// run returns how long the work took. In a cold file each byte is touched once, so no job finds what another one
// brought.
func (a *access) run(ctx context.Context, path string, seed uint64) (time.Duration, error) {
	mode := os.O_RDONLY
	if a.write {
		mode = os.O_WRONLY
	}
	part, count := a.blocks()
	files := make([]*os.File, a.jobs)
	defer func() {
		for _, f := range files {
			_ = f.Close() // harmless if f is nil or already closed
		}
	}()
	for i := range files {
		if a.shared && i > 0 {
			files[i] = files[0]
			continue
		}
		f, err := os.OpenFile(path, mode|a.flags, 0)
		if err != nil {
			return 0, err
		}
		files[i] = f
	}
	errs := make([]error, a.jobs)
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i, f := range files {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		order := make([]int, part)
		for k := range order {
			order[k] = k
		}
		if a.random {
			order = rnd.Perm(int(part))
		}
		buf := aligned(int(a.block))
		for k := range buf {
			buf[k] = byte(seed) // different data in each run
		}
		wg.Go(func() {
			<-begin
			for _, k := range order[:count] {
				if errs[i] = ctx.Err(); errs[i] != nil {
					return
				}
				at := (int64(i)*part + int64(k)) * a.block
				if a.write {
					_, errs[i] = f.WriteAt(buf, at)
				} else {
					_, errs[i] = f.ReadAt(buf, at)
				}
				if errs[i] == nil && a.verify != nil {
					errs[i] = a.verify(buf, at)
				}
				if errs[i] != nil {
					return
				}
			}
		})
	}
	start := time.Now()
	close(begin)
	wg.Wait()
	return time.Since(start), errors.Join(errs...)
}

// bytes returns how many bytes run goes through.
func (a *access) bytes() int64 {
	_, count := a.blocks()
	return count * a.block * int64(a.jobs)
}

// blocks returns how many blocks each job's part has, and how many of them the job goes through.
func (a *access) blocks() (part, count int64) {
	part = a.size / int64(a.jobs) / a.block
	return part, min(max(a.amount/int64(a.jobs)/a.block, 1), part)
}

// aligned returns n bytes at an address that O_DIRECT accepts.
func aligned(n int) []byte {
	p := make([]byte, n+pageSize)
	// This only looks at the address. p stays alive through the part that is returned.
	skip := int(-uintptr(unsafe.Pointer(&p[0])) & (pageSize - 1))
	return p[skip : skip+n : skip+n]
}

// load keeps a disk busy until it is closed.
type load struct {
	end  context.CancelFunc
	jobs sync.WaitGroup
}

// loadJobs is how many other readers use the disk.
const loadJobs = 4

// startLoad starts random reads of a file past the page cache, 256 KiB each.
func startLoad(ctx context.Context, path string, size int64) (*load, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	const block = 256 << 10
	if _, err := f.ReadAt(aligned(pageSize), 0); err != nil { // some filesystems refuse O_DIRECT only here
		_ = f.Close()
		return nil, err
	}
	ctx, end := context.WithCancel(ctx)
	l := &load{end: end}
	for i := range loadJobs {
		buf := aligned(block)
		rnd := rand.New(rand.NewPCG(9, uint64(i)))
		l.jobs.Go(func() {
			for ctx.Err() == nil {
				_, _ = f.ReadAt(buf, rnd.Int64N(max(size/block, 1))*block) // a background read may fail
			}
		})
	}
	context.AfterFunc(ctx, func() {
		l.jobs.Wait()
		_ = f.Close()
	})
	return l, nil
}

// close stops the reads and waits for their end.
func (l *load) close() {
	l.end()
	l.jobs.Wait()
}
