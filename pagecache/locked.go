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
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// The pages of a file that is pinned on the host are page-locked in the host's page cache. Devices copy from them where
// they are, so no core reads the bytes, and as many links work at once as there are.
//
// The pages show every change that goes through the host's page cache. Others may take pages out of it: a truncation,
// a hole, a write past it. So every change of home unlocks the file (spoilLocked), and its pages are locked again once
// home was left alone for relockAfter. A change made directly in SOURCE is noticed with the next look, as always; until
// then devices may copy the earlier bytes.
//
// The pages of a hot file are locked, too (hot.go).

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

// locking is the state of a file's locked pages.
type locking struct {
	now atomic.Pointer[lockedHome] // set with File.mu held, cleared with at least a read lock of it
	// bytes is how much is locked, or was locked by a lock in progress.
	bytes atomic.Int64
	// one has an element while somebody locks pages.
	one chan struct{}
	// spoilt counts changes of home; last is when the last one was (clock).
	spoilt, last atomic.Int64
	// failed is why the pages are not locked, or nil. It is cleared when the file is unpinned.
	failed atomic.Pointer[error]
	// gaveUp: locking failed, and not for want of memory. The background tries again after the next SetPinning, which
	// the next use of the file calls.
	gaveUp atomic.Bool
	// wasLocked: the pages have been locked before. Such a file stays attached while it waits for memory.
	wasLocked atomic.Bool
	heat      heat
}

// pages returns the locked pages, or nil.
func (k *locking) pages() mover.Locked {
	if l := k.now.Load(); l != nil {
		return l
	}
	return nil
}

// lockedHome is all pages of a file, locked. It implements mover.Locked.
type lockedHome struct {
	c      *Cache
	mem    []byte
	unmap  func() error
	memory *residency.FileMemory
	whole  int64 // bytes in whole pages of the file

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
	defer l.memory.Free()
	var errs []error
	for _, unlock := range l.unlock {
		if err := unlock(); !errors.Is(err, gpubackend.ErrDeviceLost) {
			errs = append(errs, err)
		}
	}
	if l.unmap != nil {
		errs = append(errs, l.unmap())
	}
	return errors.Join(errs...)
}

// countsFor returns the pinned memory that a locked file of so many bytes counts for.
func countsFor(size int64) int64 { return max(page.Count(size).Offset(), leastLocked) }

// PinnedOnHost implements residency.LockedFile.
func (f *File) PinnedOnHost() (by residency.Tenant, pinned bool) {
	p := f.Pinning()
	return p.tenant(f.c), p.Host
}

// mayLock reports whether the pages may be locked.
func (f *File) mayLock() bool { return f.Pinning().Host || f.locking.heat.hot.Load() }

// shallLock reports whether the pages shall be locked, if need be by the background.
func (f *File) shallLock() bool { return f.mayLock() && !f.locking.gaveUp.Load() }

// staysForLock reports whether the file stays attached because its pages are locked, or shall be. A file that has found
// no memory since it was attached does not stay: there may be very many of these.
func (f *File) staysForLock() bool {
	return f.shallLock() && (f.locking.wasLocked.Load() || f.locking.failed.Load() == nil)
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
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	locked := f.settleLocked()
	f.mu.Unlock()
	if locked {
		return nil
	}
	pin := f.pinning.Load()
	err := f.lockUnchanged(ctx)
	f.lockEnded(ctx, pin, err)
	return err
}

// settleLocked reports whether the pages are locked. A pin takes over the memory of a file that was hot before. If it
// may not have that at once, or the memory is that of a former pin, settleLocked unlocks the pages.
func (f *File) settleLocked() bool {
	l := f.locking.now.Load()
	if l == nil {
		return false
	}
	if pinned := f.Pinning().Host; pinned && l.memory.Pin() || !pinned && l.memory.IsHot() {
		return true
	}
	f.unlockHomeLocked()
	return false
}

// memoryFor returns memory for n bytes of locked pages: that of a pin, or of hot files.
func (f *File) memoryFor(ctx context.Context, n int64) (*residency.FileMemory, error) {
	if f.Pinning().Host {
		return f.c.pinned.LockFile(ctx, f, n)
	}
	return f.c.pinned.LockHot(f, n)
}

// lockUnchanged locks the pages. It fails with EAGAIN if home changes meanwhile. The caller holds locking.one.
func (f *File) lockUnchanged(ctx context.Context) error {
	if !f.mayLock() {
		return fail(syscall.EINVAL, "%s is not pinned on the host", f.Name())
	}
	if err := f.checkHome(ctx); err != nil {
		return err
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	home, size, spoilt := f.home.Backing(), f.home.Size(), f.locking.spoilt.Load()
	f.mu.Unlock()
	// LockFile may wait until nobody reads pages of this file that were unlocked. So this is no reader yet.
	memory, err := f.memoryFor(ctx, countsFor(size))
	if err != nil {
		return err
	}
	l := &lockedHome{c: f.c, memory: memory, whole: size &^ (page.Size - 1)}
	if err := f.lockInto(ctx, l, home, size, spoilt); err != nil {
		return errors.Join(err, l.Close())
	}
	return nil
}

// lockInto locks the pages into l, and makes the file use l. It fails if home has changed, or changes meanwhile.
func (f *File) lockInto(ctx context.Context, l *lockedHome, home Home, size, spoilt int64) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	err := f.mayLockLocked(l, home, size, spoilt)
	if err == nil {
		f.home.BeginRead()
		defer f.home.EndRead()
	}
	f.mu.Unlock()
	if err == nil {
		err = f.c.lockPages(ctx, l, home, page.Count(size).Offset(), &f.locking.bytes)
	}
	if err != nil {
		return err
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if err = f.lookLocked(ctx); err == nil {
		err = f.mayLockLocked(l, home, size, spoilt)
	}
	if err == nil {
		f.locking.now.Store(l)
	}
	return err
}

// mayLockLocked says why l cannot be used: home must still be as it was, and l's memory that of a pin if there is one.
func (f *File) mayLockLocked(l *lockedHome, home Home, size, spoilt int64) error {
	switch {
	case f.detached.Load():
		return fail(syscall.ESHUTDOWN, "the file is no longer in use")
	case !f.mayLock():
		return fail(syscall.EINVAL, "%s was unpinned", f.Name())
	case f.locking.spoilt.Load() != spoilt || f.home.Size() != size || f.home.Backing() != home:
		return fail(syscall.EAGAIN, "%s keeps being changed, so its pages cannot be pinned", f.Name())
	case l.memory.IsHot() == f.Pinning().Host:
		return fail(syscall.EAGAIN, "%s was pinned or unpinned while its pages were being locked", f.Name())
	}
	return nil
}

// lockEnded notes how an attempt to lock the pages ended, which began with this pin. An attempt whose caller gave up
// says nothing about the file. If there is another pin now, the background tries again.
func (f *File) lockEnded(ctx context.Context, pin *Pinning, err error) {
	k := &f.locking
	if err != nil {
		k.bytes.Store(0)
	}
	if pin == nil || !pin.Host {
		if err != nil {
			k.heat.cool()
		}
		return
	}
	switch {
	case err == nil, errors.Is(err, syscall.EAGAIN):
		k.gaveUp.Store(false)
		k.failed.Store(nil)
	case ctx.Err() == nil:
		k.gaveUp.Store(!errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT))
		known := k.failed.Swap(&err) != nil
		if f.pinning.Load() != pin { // SetPinning may have come before the reason
			k.gaveUp.Store(false)
		}
		if !f.Pinning().Host {
			k.failed.Store(nil)
		} else if !known {
			f.c.log.Warn("a pinned file is not locked in the host's memory", "file", f.Name(), "error", err)
		}
	}
}

// lockPages locks the first n bytes of home into l. bytes counts what is locked.
func (c *Cache) lockPages(ctx context.Context, l *lockedHome, home Home, n int64, bytes *atomic.Int64) error {
	from, ok := home.(MappedHome)
	devices := c.oneOfEachKind()
	switch {
	case !ok:
		return fail(syscall.EOPNOTSUPP, "the pages of this file cannot be mapped")
	case len(devices) == 0:
		return fail(syscall.ENODEV, "the mount has no devices, so there is nothing to pin files on the host for")
	}
	bytes.Store(0)
	return l.lock(ctx, from, n, devices, bytes)
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

// unlockHomeLocked unlocks the pages of the file, once nobody copies from them. A read lock of File.mu is enough. It
// does not wait.
func (f *File) unlockHomeLocked() {
	l := f.locking.now.Swap(nil)
	if l == nil {
		return
	}
	f.locking.bytes.Store(0)
	f.locking.wasLocked.Store(true)
	l.memory.Retire()
	f.c.homes.Reads.Add(1)
	_ = f.home.CloseUnread(func() error {
		go func() { // it takes as long as locking did
			defer f.c.homes.Reads.Done()
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
	f.locking.last.Store(clock())
	f.locking.heat.cool()
	f.unlockHomeLocked()
}

// relockDueLocked locks the pages again, in the background, if that is due and there is memory.
func (f *File) relockDueLocked(ctx context.Context) {
	k := &f.locking
	if !f.shallLock() || len(k.one) > 0 { // somebody does it
		return
	}
	if f.settleLocked() || since(k.last.Load()) < f.c.relockAfter {
		return
	}
	pin := f.pinning.Load()
	if pin != nil && pin.Host {
		if err := f.c.pinned.CheckRoom(f, countsFor(f.home.Size())); err != nil {
			f.lockEnded(ctx, pin, err)
			return
		}
	}
	f.c.background.Go(func() { _ = f.lockHome(ctx) }) // lockEnded logs errors
}

// unlockFor unlocks files until no more memory is pinned than the limit, and waits until they are unlocked. Attempts to
// lock pages that are under way fail with EAGAIN; the next attempts see the limit.
func (c *Cache) unlockFor(ctx context.Context) error {
	reason := fail(syscall.ENOSPC, "the pinned memory became less, so the pages were unlocked")
	for _, f := range c.snapshotFiles() {
		k, hot := &f.locking, !f.Pinning().Host
		l := k.now.Load()
		if l != nil {
			hot = l.memory.IsHot()
		}
		over := c.pinned.Over
		if hot {
			over = c.pinned.HotOver
		}
		if l == nil && len(k.one) == 0 || !over() {
			continue
		}
		if err := f.mu.LockIn(ctx); err != nil {
			return err
		}
		f.locking.spoilt.Add(1)
		if f.locking.now.Load() != nil {
			f.unlockHomeLocked()
			f.lockEnded(ctx, f.pinning.Load(), reason)
		}
		f.mu.Unlock()
	}
	return c.pinned.WaitRetired(ctx)
}

// errnoOf returns the errno that err wraps, EIO if there is none.
func errnoOf(err error) syscall.Errno {
	errno := syscall.EIO
	errors.As(err, &errno)
	return errno
}
