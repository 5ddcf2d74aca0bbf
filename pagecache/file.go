package pagecache

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/home"
	"github.com/gaiafs/gaiafs/pagecache/kernel"
	"github.com/gaiafs/gaiafs/versions"
)

// ErrDetached means that devices hold nothing of the file any more. The request goes directly to home.
var ErrDetached = errors.New("no device holds anything of the file")

// batchPages is the number of pages moved under one hold of File.mu: 4 MiB.
const batchPages = 1024

// File is what devices hold of one file. It exists as long as the file has a mapping or an extent.
type File struct {
	c  *Cache
	id FileID // immutable

	// users counts the Map calls in progress. They keep the File attached. Protected by Cache.mu.
	users int

	detached atomic.Bool // set once, under mu
	// letGo is the callback of WhenDetached, or nil.
	letGo atomic.Pointer[func()]

	// mu is read-locked by writes to different pages. They change what it protects under writes.mu (write.go).
	mu     fileLock
	writes writes
	path   atomic.Pointer[string] // what Name returns
	home   *home.Home             // immutable
	kernel *kernel.Kernel         // immutable
	// doubt has the pages that a direct change of home may have touched (beside.go). Protected by mu.
	doubt []page.Range
	// orphan means that the file has no name and no open descriptor left. Protected by mu.
	orphan bool

	lrc lrc.File // protected by mu
	// states is the size of lrc as last charged to the account. Protected by mu.
	states   int64
	holdings map[versions.Owner]*holding // protected by mu
	others   []*holding                  // holdings beyond the first of each device. Protected by mu
	rights   Rights                      // as last checked. Protected by mu
	taken    uint64                      // counts how often rights were revoked. Protected by mu
	bases    bases                       // protected by mu
	flights  flights                     // added and removed with mu held
	// turn has room for the one read that may wait for mu: see readInTurn.
	turn chan struct{}
	// landing is the timer that checks whether reads pause. Protected by mu.
	landing  *time.Timer
	mappings map[*Mapping]struct{} // protected by mu
	backlog  backlog
	// collectingRuns are the runs that CPU reads collected from devices. Protected by mu.
	collectingRuns collectingRuns
	// toldPastEnd means that the log has reported stores past end of file. Protected by mu.
	toldPastEnd bool
	// unreported are losses that no Sync has reported yet. They keep the File attached. Protected by mu.
	unreported []*Loss
	// pinning is the argument of the last SetPinning.
	pinning atomic.Pointer[Pinning]

	locking locking

	serial uint64          // immutable; identifies the File
	clean  *cleanread.File // the state of CPU reads; immutable

	views fileViews

	published publication
	// releases counts the releases by devices. Protected by mu.
	releases uint64

	counters Counters

	sight sight
}

// Name returns the path below the mountpoint when the file was last mapped.
func (f *File) Name() string { return *f.path.Load() }

func (f *File) setName(name string) { f.path.Store(&name) }

// Detached reports that devices hold nothing of the file any more. Requests then need not consult f.
func (f *File) Detached() bool { return f.detached.Load() }

// Size returns the size of home after this mount's last change.
func (f *File) Size() int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.home.Size()
}

// ShownTimes returns the times to show to programs if home has the given ones.
func (f *File) ShownTimes(mtime, ctime time.Time) (shownMtime, shownCtime time.Time) {
	return f.home.ShownTimes(mtime, ctime)
}

// Coming returns an upper bound on the released pages that devices may soon write home.
func (f *File) Coming() page.Index { return page.Index(f.backlog.coming.Load()) }

// open returns the File of src, creating it if needed, and counts the caller as a user until done is called. If
// writable is set and home was opened read-only, open opens it again for writing.
func (c *Cache) open(ctx context.Context, src Source, writable bool) (f *File, done func(), err error) {
	id := src.ID()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, nil, fail(syscall.ESHUTDOWN, "the file system is being unmounted")
	}
	f = c.files[id]
	if f != nil {
		f.users++
	}
	c.mu.Unlock()

	if f == nil {
		if f, err = c.newFile(ctx, src, writable); err != nil {
			return nil, nil, err
		}
	}
	done = func() { f.leave(ctx) }
	if err := f.mu.LockIn(ctx); err != nil {
		done()
		return nil, nil, err
	}
	f.setName(src.Name())
	f.kernel.Meet(src.Kernel())
	if writable && !f.home.Backing().Writable() {
		var file Home
		if file, err = src.OpenHome(true); err == nil {
			f.home.Replace(file)
		}
	}
	if home, cares := f.home.Backing().(UserHome); cares && writable && err == nil {
		home.WrittenFor(src)
	}
	f.mu.Unlock()
	if err != nil {
		done()
		return nil, nil, err
	}
	src.Attach(f)
	return f, done, nil
}

// newFile registers a File for src with one user. If another goroutine was faster, it joins that File.
func (c *Cache) newFile(ctx context.Context, src Source, writable bool) (*File, error) {
	file, err := src.OpenHome(writable)
	if err != nil {
		return nil, err
	}
	f := &File{
		c:        c,
		id:       src.ID(),
		users:    1,
		holdings: make(map[versions.Owner]*holding),
		mappings: make(map[*Mapping]struct{}),
		turn:     make(chan struct{}, 1),
		locking:  locking{one: make(chan struct{}, 1)},
	}
	f.setName(src.Name())
	f.serial, f.bases.memory = c.serials.Add(1), &c.pages
	f.home = home.New(&c.homes, file, home.Options{Name: f.Name, Dev: f.id.Dev, Parallel: func(pages int64) {
		f.count(func(c *Counters) { c.ParallelPages.Add(pages) })
	}})
	f.clean = c.clean.NewFile(f.serial, executor{f})
	f.kernel = kernel.New(&f.mu, cpu{f}, src.Kernel(), c.writeBack)
	f.lrc.HeldUnasked, f.lrc.Changed = f.kernel.CachesWrites(), f.changed
	if err := f.home.Meet(); err != nil { // f is not shared yet
		_ = file.Close()
		return nil, err
	}
	c.mu.Lock()
	if other := c.files[f.id]; other != nil {
		other.users++
		c.mu.Unlock()
		_ = file.Close()
		return other, nil
	}
	c.publications.meet(f)
	c.files[f.id] = f
	c.heats.recall(f)
	c.mu.Unlock()
	// When Attach returns, requests that did not consult f have ended. Their changes must not count as changes made
	// directly in SOURCE.
	src.Attach(f)
	err = f.mu.LockIn(ctx)
	if err == nil {
		err = f.home.Meet()
		f.mu.Unlock()
	}
	if err != nil {
		f.leave(ctx)
		return nil, err
	}
	return f, nil
}

// leave removes a user. Others may still use the File.
func (f *File) leave(ctx context.Context) {
	f.c.mu.Lock()
	f.users--
	f.c.mu.Unlock()
	f.whenFree(ctx, f.dropIdleLocked)
}

// dropIdleLocked frees the unmapped extents of an orphan. It detaches a File that holds nothing and that nobody is
// about to map.
func (f *File) dropIdleLocked() {
	if f.detached.Load() {
		return
	}
	if f.orphan {
		for _, h := range f.holdings {
			for _, x := range h.sorted() {
				if !f.movesLocked(x) { // programs may want it again
					f.loseExtentLocked(x)
				}
			}
		}
		f.views.drop()
	}
	if len(f.mappings) > 0 || f.views.any() ||
		!f.orphan && (len(f.unreported) > 0 || f.flights.any() || f.staysForLock()) {
		return
	}
	for _, h := range f.holdings {
		if !h.empty() {
			return
		}
	}
	if !f.detachLocked() {
		return
	}
	f.lrc.CheckEnded()
	f.discardFlights()
	f.nothingWaitsLocked()
	f.dropAllBasesLocked()
	for h := range f.holdersLocked() {
		h.dev.room.Forget(h)
	}
	f.c.memory.charge(memoryStates, -f.states)
	f.clean.Close()
	f.unlockHomeLocked()
	if err := f.home.Close(); err != nil {
		f.c.log.Warn("closing the backing file", "file", f.Name(), "error", err)
	}
}

// detachLocked removes the File from the Cache, unless a caller is about to map it.
func (f *File) detachLocked() bool {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if f.users > 0 || f.c.files[f.id] != f {
		return false
	}
	delete(f.c.files, f.id)
	f.c.heats.keep(f)
	f.detached.Store(true)
	if !f.orphan {
		f.c.publications.leave(f)
	}
	if letGo := f.letGo.Load(); letGo != nil {
		(*letGo)()
	}
	return true
}

// WhenDetached sets the function to call when the File is detached, and replaces an earlier one. Owners of references
// use it to drop them: a detached File still takes some KiB. letGo must not block, and may be called twice.
func (f *File) WhenDetached(letGo func()) {
	f.letGo.Store(&letGo)
	if f.Detached() {
		letGo()
	}
}

// mappedLocked returns the number of mappings that clients have.
func (f *File) mappedLocked() (n int) {
	for m := range f.mappings {
		if m.whole == nil {
			n++
		}
	}
	return n
}

func (f *File) snapshotMappings() []*Mapping {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]*Mapping, 0, len(f.mappings))
	for m := range f.mappings {
		if m.whole == nil {
			list = append(list, m)
		}
	}
	return list
}

// readHomeLocked reads the pages of rg from home, flights included, into p, which has rg.Bytes() bytes. Bytes past end
// of file read as zero.
func (f *File) readHomeLocked(rg page.Range, p []byte) error {
	n, err := f.homeLocked().ReadAt(p, rg.Offset())
	if err != nil {
		return err
	}
	clear(p[n:])
	return nil
}

// fileRangeLocked returns the pages that hold bytes of the file.
func (f *File) fileRangeLocked() page.Range { return page.Range{End: page.Count(f.home.Size())} }
