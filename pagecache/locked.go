package pagecache

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// The pages of a file that is pinned on the host are page-locked in the host's page cache. Devices copy from them where
// they are, so no core reads the bytes, and as many links work at once as there are.
//
// The pages show every change that goes through the host's page cache. Others may take pages out of it: a truncation,
// a hole, a write past it. So every change of home unlocks the file (spoilLocked), and its pages are locked again once
// home was left alone for relockAfter. A change made directly in SOURCE is noticed with the next look, as always; until
// then devices may copy the earlier bytes.

const (
	// leastLocked is the least that a locked file counts for. Each takes mappings of the daemon, whose number the
	// kernel limits.
	leastLocked = 16 << 20
	// lockChunk is what is locked in one piece. Devices do not copy from two of them at once, so there should be few.
	// lockStep is what is read at once to lock it, and lockers is how many goroutines do that.
	lockChunk = 512 << 20
	lockStep  = 32 << 20
	lockers   = 4
	// relockAfter is how long home must be unchanged, by default, before its pages are locked again.
	relockAfter = 2 * time.Second
)

// MappedHome is a Home whose pages in the host's page cache can be mapped.
type MappedHome interface {
	Home
	// Map maps the first n bytes for reading; n is a multiple of page.Size. Reading beyond the end of the file faults.
	Map(n int64) (mem []byte, unmap func() error, err error)
}

// locking is the state of a file's locked pages.
type locking struct {
	now atomic.Pointer[lockedHome] // set with File.mu held, cleared with at least a read lock of it
	// bytes is how much is locked, or was locked by a lock in progress.
	bytes atomic.Int64
	// wanted keeps the file attached and makes the background lock it again. It ends when locking fails.
	wanted atomic.Bool
	// one has an element while somebody locks pages.
	one chan struct{}
	// leaving is what was unlocked last. It counts as pinned memory until nobody copies from it any more.
	leaving atomic.Pointer[lockedHome]
	// spoilt counts changes of home; last is when the last one was, in nanoseconds since the epoch.
	spoilt, last atomic.Int64
	// failed is why the last attempt failed, or nil.
	failed atomic.Pointer[error]
}

// lockedHome is all pages of a file, locked. It implements mover.Locked.
type lockedHome struct {
	c      *Cache
	mem    []byte
	unmap  func() error
	by     residency.Tenant
	whole  int64         // bytes in whole pages of the file
	counts int64         // bytes of pinned memory that the file counts for
	closed chan struct{} // closed when Close has ended

	mu     sync.Mutex
	unlock []func() error // protected by mu until all is locked; then Close has it
}

// At implements mover.Locked. In a last page that the file has only in part, others who map the file may have stored
// bytes past the end of the file.
func (l *lockedHome) At(off, n int64) []byte {
	if n <= 0 || off+n > l.whole || off/lockChunk != (off+n-1)/lockChunk {
		return nil
	}
	return l.mem[off : off+n : off+n]
}

// Close unlocks the pages. Nobody may be reading them.
func (l *lockedHome) Close() error {
	defer close(l.closed)
	var errs []error
	for _, unlock := range l.unlock {
		if err := unlock(); !errors.Is(err, gpubackend.ErrDeviceLost) {
			errs = append(errs, err)
		}
	}
	if l.unmap != nil {
		errs = append(errs, l.unmap())
	}
	l.c.pinned.UnlockFile(l.by, l.counts)
	return errors.Join(errs...)
}

// waitClosed waits until Close has ended. l may be nil.
func (l *lockedHome) waitClosed(ctx context.Context) error {
	if l == nil {
		return nil
	}
	select {
	case <-l.closed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// countsFor returns the pinned memory that a locked file of so many bytes counts for.
func countsFor(size int64) int64 { return max(page.Count(size).Offset(), leastLocked) }

// lockedFor returns the pinned memory that a user's locked file counts for; 0 for no file.
func (f *File) lockedFor(by residency.Tenant) int64 {
	if f == nil {
		return 0
	}
	if l := f.locking.now.Load(); l != nil && l.by == by {
		return l.counts
	}
	return 0
}

// LockHome locks the pages of a file that is pinned on the host, and returns when they are locked. It blocks on home.
// Errors: EINVAL if the file is not pinned on the host; ENOSPC and EDQUOT as CheckPinning; ENODEV without devices;
// EOPNOTSUPP if the device, the host or the filesystem cannot lock pages of files; EAGAIN if the file keeps changing;
// and those of home.
func (c *Cache) LockHome(ctx context.Context, src Source) error {
	f, done, err := c.open(ctx, src, false)
	if err != nil {
		return err
	}
	defer done()
	const tries = 3
	for range tries {
		if err = f.lockHome(ctx); !errors.Is(err, syscall.EAGAIN) {
			return err
		}
	}
	return err
}

// lockHome is LockHome for a File.
func (f *File) lockHome(ctx context.Context) error {
	k := &f.locking
	select {
	case k.one <- struct{}{}:
		defer func() { <-k.one }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if k.now.Load() != nil {
		return nil
	}
	err := f.lockUnchanged(ctx)
	k.ended(ctx, f, err)
	return err
}

// lockUnchanged locks the pages. It fails with EAGAIN if home changes meanwhile. The caller holds locking.one.
func (f *File) lockUnchanged(ctx context.Context) error {
	k, pin := &f.locking, f.Pinning()
	if !pin.Host {
		return fail(syscall.EINVAL, "%s is not pinned on the host", f.Name())
	}
	if err := k.leaving.Load().waitClosed(ctx); err != nil {
		return err
	}
	if err := f.checkHome(ctx); err != nil {
		return err
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	home, size, spoilt := f.home, f.size, k.spoilt.Load()
	f.beginRead()
	f.mu.Unlock()
	defer f.endRead()
	l, err := f.c.lockPages(ctx, home, size, pin.tenant(f.c), &k.bytes)
	if err != nil {
		return err
	}
	if err = f.mu.LockIn(ctx); err == nil {
		if err = f.lookLocked(ctx); err == nil {
			err = f.mayLockLocked(home, size, spoilt)
		}
		if err == nil {
			k.wanted.Store(true) // now, so that the next change unlocks the pages
			k.now.Store(l)
		}
		f.mu.Unlock()
	}
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return nil
}

// mayLockLocked says why pages that were locked cannot be used: home must still be as it was then.
func (f *File) mayLockLocked(home Home, size, spoilt int64) error {
	switch {
	case f.detached.Load():
		return fail(syscall.ESHUTDOWN, "the file is no longer in use")
	case !f.Pinning().Host:
		return fail(syscall.EINVAL, "%s was unpinned", f.Name())
	case f.locking.spoilt.Load() != spoilt || f.size != size || f.home != home:
		return fail(syscall.EAGAIN, "%s keeps being changed, so its pages cannot be pinned", f.Name())
	}
	return nil
}

// ended notes how an attempt to lock the pages of f ended. An attempt whose caller gave up says nothing about the file.
func (k *locking) ended(ctx context.Context, f *File, err error) {
	if err != nil {
		k.bytes.Store(0)
	}
	switch {
	case err == nil:
		k.failed.Store(nil)
	case errors.Is(err, syscall.EAGAIN):
		k.failed.Store(nil)
		k.wanted.Store(f.Pinning().Host)
	case ctx.Err() == nil:
		k.failed.Store(&err)
		k.wanted.Store(false)
	}
}

// lockPages locks all pages of home. bytes shows how far it is.
func (c *Cache) lockPages(ctx context.Context, home Home, size int64, by residency.Tenant,
	bytes *atomic.Int64) (*lockedHome, error) {
	from, ok := home.(MappedHome)
	devices := c.oneOfEachKind()
	switch {
	case !ok:
		return nil, fail(syscall.EOPNOTSUPP, "the pages of this file cannot be mapped")
	case len(devices) == 0:
		return nil, fail(syscall.ENODEV, "the mount has no devices, so there is nothing to pin files on the host for")
	}
	l := &lockedHome{c: c, by: by, whole: size &^ (page.Size - 1), counts: countsFor(size), closed: make(chan struct{})}
	if err := c.pinned.LockFile(by, l.counts); err != nil {
		return nil, err
	}
	bytes.Store(0)
	err := l.lock(ctx, from, page.Count(size).Offset(), devices, bytes)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// lock maps n bytes and locks them for devices.
func (l *lockedHome) lock(ctx context.Context, home MappedHome, n int64, devices []*device,
	bytes *atomic.Int64) (err error) {
	if n == 0 {
		return nil
	}
	if l.mem, l.unmap, err = home.Map(n); err != nil {
		return fail(errnoOf(err), "the pages of this file cannot be mapped: %v", err)
	}
	var next atomic.Int64
	errs := make([]error, lockers)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			for errs[i] == nil {
				off := next.Add(lockChunk) - lockChunk
				if off >= n {
					return
				}
				errs[i] = l.lockChunk(ctx, l.mem[off:min(off+lockChunk, n)], devices, bytes)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// lockChunk reads a chunk into the page cache and locks it. Reading first keeps the time short in which the driver
// waits for home.
func (l *lockedHome) lockChunk(ctx context.Context, mem []byte, devices []*device, bytes *atomic.Int64) error {
	for at := 0; at < len(mem); at += lockStep {
		if err := ctx.Err(); err != nil {
			return err
		}
		step := mem[at:min(at+lockStep, len(mem))]
		_ = unix.Madvise(step, unix.MADV_WILLNEED)
		err := unix.Madvise(step, unix.MADV_POPULATE_READ)
		if err != nil && err != syscall.EINVAL { // which means a Linux before 5.14
			return fail(errnoOf(err), "the file cannot be read: %v", err)
		}
		bytes.Add(int64(len(step)))
	}
	for _, d := range devices {
		unlock, err := d.LockHost(mem)
		if err != nil {
			l.c.lose(d, err)
			if gone := d.gone(); gone != nil {
				return gone
			}
			return fail(syscall.EOPNOTSUPP, "device %d cannot lock pages of this file: %v", d.info.Ordinal, err)
		}
		l.mu.Lock()
		l.unlock = append(l.unlock, unlock)
		l.mu.Unlock()
	}
	return nil
}

// oneOfEachKind returns a device of each kind that the mount has. What is locked for one is locked for all of its kind.
func (c *Cache) oneOfEachKind() (list []*device) {
	seen := make(map[gpubackend.Kind]bool)
	for _, d := range c.devices {
		if d.gone() == nil && !seen[d.info.Kind] {
			seen[d.info.Kind] = true
			list = append(list, d)
		}
	}
	return list
}

// unlockHomeLocked unlocks the pages of the file, once nobody copies from them. again says that they should be locked
// again. A read lock of File.mu is enough. It does not wait.
func (f *File) unlockHomeLocked(again bool) {
	k := &f.locking
	if !again {
		k.wanted.Store(false)
	}
	l := k.now.Swap(nil)
	if l == nil {
		return
	}
	k.bytes.Store(0)
	k.leaving.Store(l)
	f.c.reads.Add(1)
	_ = f.closeUnread(func() error {
		go func() { // it takes as long as locking did
			defer f.c.reads.Done()
			if err := l.Close(); err != nil {
				f.c.log.Warn("unlocking the pages of a file", "file", f.Name(), "error", err)
			}
		}()
		return nil
	})
}

// spoilHomeLocked notes that home changed. A read lock of File.mu is enough.
func (f *File) spoilHomeLocked() {
	f.locking.spoilt.Add(1)
	if f.locking.wanted.Load() {
		f.locking.last.Store(time.Now().UnixNano())
		f.unlockHomeLocked(true)
	}
}

// relockDue locks the pages again, in the background, if that is due.
func (f *File) relockDue(ctx context.Context) {
	k := &f.locking
	if !k.wanted.Load() || k.now.Load() != nil || time.Since(time.Unix(0, k.last.Load())) < f.c.relockAfter {
		return
	}
	if len(k.one) > 0 {
		return // somebody does it
	}
	f.c.background.Go(func() {
		if err := f.lockHome(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, syscall.EAGAIN) {
			f.c.log.Warn("a pinned file is not locked in the host's memory", "file", f.Name(), "error", err)
		}
	})
}

// unlockFor unlocks files until no more memory is pinned than the limit. It waits until they are unlocked.
func (c *Cache) unlockFor(ctx context.Context) error {
	for _, f := range c.snapshotFiles() {
		if !c.pinned.Over() {
			return nil
		}
		if f.locking.now.Load() == nil {
			continue
		}
		if err := f.mu.LockIn(ctx); err != nil {
			return err
		}
		unlocked := f.locking.now.Load() != nil
		f.unlockHomeLocked(false)
		f.mu.Unlock()
		if unlocked {
			c.log.Warn("a pinned file was unlocked because the pinned memory became less", "file", f.Name())
		}
		if err := f.locking.leaving.Load().waitClosed(ctx); err != nil {
			return err
		}
	}
	return nil
}

// errnoOf returns the errno that err wraps, EIO if there is none.
func errnoOf(err error) syscall.Errno {
	errno := syscall.EIO
	errors.As(err, &errno)
	return errno
}
