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

// access is a workload of the bench's own: each of several jobs goes once through a part of a file.
type access struct {
	write, random bool
	// shared has the jobs be threads of one program, which read through one descriptor.
	shared bool
	block  int64
	jobs   int
	// size is the bytes of the file, and amount how many of them are gone through, by all jobs together.
	size, amount int64
	// flags are of open(2), besides the access mode.
	flags int
	// verify is called with what was read, from off on; nil where nobody wants to know.
	verify func(p []byte, off int64) error
}

// run returns how long that took. Where the file is cold, each byte is touched once, so no job finds what another
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
			_ = f.Close() // of nil, too, and of what is closed
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
			buf[k] = byte(seed) // what is written differs from run to run
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

// bytes is how much run goes through.
func (a *access) bytes() int64 {
	_, count := a.blocks()
	return count * a.block * int64(a.jobs)
}

// blocks returns how many blocks the part of each job has, and how many of them it goes through.
func (a *access) blocks() (part, count int64) {
	part = a.size / int64(a.jobs) / a.block
	return part, min(max(a.amount/int64(a.jobs)/a.block, 1), part)
}

// aligned returns n bytes at an address that O_DIRECT takes.
func aligned(n int) []byte {
	p := make([]byte, n+pageSize)
	// Only the address is looked at; p stays alive by the part of it that is returned.
	skip := int(-uintptr(unsafe.Pointer(&p[0])) & (pageSize - 1))
	return p[skip : skip+n : skip+n]
}

// load keeps a disk busy until it is ended.
type load struct {
	end  context.CancelFunc
	jobs sync.WaitGroup
}

// loadJobs is how many programs use the disk beside the one that is measured.
const loadJobs = 4

// startLoad reads a file past the page cache at random places, 256 KiB at once.
func startLoad(ctx context.Context, path string, size int64) (*load, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	const block = 256 << 10
	if _, err := f.ReadAt(aligned(pageSize), 0); err != nil { // some filesystems refuse only now
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
				_, _ = f.ReadAt(buf, rnd.Int64N(max(size/block, 1))*block) // one who is in the way need not succeed
			}
		})
	}
	context.AfterFunc(ctx, func() {
		l.jobs.Wait()
		_ = f.Close()
	})
	return l, nil
}

// close returns when nothing is read any more.
func (l *load) close() {
	l.end()
	l.jobs.Wait()
}
