package pagecache

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/versions"
)

// ErrDetached says that devices hold nothing of the file any more: the request goes to home directly.
var ErrDetached = errors.New("no device holds anything of the file")

// batchPages is the number of pages that are moved under one hold of File.mu: 4 MiB.
const batchPages = 1024

// File is what devices hold of one file. It exists while a mapping of the file does, or an extent.
type File struct {
	c  *Cache
	id FileID // immutable
	// coldWay is that of the disk; immutable.
	coldWay *mover.ColdWay

	// users counts the calls of Map in progress, which keep the File attached. Protected by Cache.mu.
	users int

	detached atomic.Bool // set once, under mu
	// letGo is what WhenDetached was told, or nil.
	letGo atomic.Pointer[func()]

	// mu is read-locked by writes of different pages, which change what it protects under writes.mu (write.go).
	mu     fileLock
	writes writes
	path   atomic.Pointer[string] // what Name returns
	home   Home                   // protected by mu
	kernel KernelPages            // protected by mu
	// size is home's, as this mount left it. Protected by mu.
	size int64
	// changes is the number of changes of home beside the mount that were looked at, and doubt are the pages of which
	// it is not known yet whether they changed (beside.go). Protected by mu.
	changes uint64
	doubt   []page.Range
	// orphan says that no name and no descriptor leads to the file any more. Protected by mu.
	orphan bool

	lrc lrc.File // protected by mu
	// states is what the account was told of it. Protected by mu.
	states   int64
	holdings map[versions.Owner]*holding // protected by mu
	others   []*holding                  // those that are not a device's first. Protected by mu
	rights   Rights                      // those noticed last. Protected by mu
	taken    uint64                      // counts how often rights were taken away. Protected by mu
	bases    bases                       // protected by mu
	flights  flights                     // come and go with mu held
	// turn has room for the read that may wait for mu: see readInTurn.
	turn chan struct{}
	// landing is who will look whether reads pause. Protected by mu.
	landing  *time.Timer
	drains   map[lrc.DrainID]chan struct{} // protected by mu
	mappings map[*Mapping]struct{}         // protected by mu
	// pendingSince is when the oldest uncollected release was made, zero if there is none. Protected by mu.
	pendingSince time.Time
	// coming is the number of pages that were released since home last had everything. It is changed with mu held.
	coming atomic.Int64
	// asked counts the times that the kernel may have begun to make the file longer, and sentAll is what it was when
	// the kernel had last sent everything. sentAll is protected by mu.
	asked   atomic.Uint64
	sentAll uint64
	// shown is changed with mu held.
	shown atomic.Pointer[shownTimes]
	// collectingRuns are where CPU reads had runs brought from devices. Protected by mu.
	collectingRuns collectingRuns
	// toldPastEnd says that the log has told of stores past the end of the file. Protected by mu.
	toldPastEnd bool
	// collectErr is why the last attempt to bring bytes home failed, nil once none of those wait any more. Protected by
	// mu.
	collectErr error
	failing    atomic.Bool // collectErr is set
	// unreported is what was lost with devices and what no Sync has failed for yet. The File stays attached for it.
	// Protected by mu.
	unreported []*Loss
	// pinning is what SetPinning was told last.
	pinning atomic.Pointer[Pinning]

	// noDirect says that home cannot be read past the host's page cache. Set once.
	noDirect atomic.Bool
	// reading counts reads of home that go on without mu, closing has homes to be closed when they ended.
	readingMu sync.Mutex
	reading   int    // protected by readingMu
	closing   []Home // protected by readingMu

	serial uint64          // immutable; tells the File from others
	clean  *cleanread.File // what is known of CPU reads; immutable

	// views have bytes of the file; viewed is how many there are, for who asks without viewsMu.
	viewsMu sync.Mutex
	views   []*viewPart // protected by viewsMu
	// expected is how many views are about to read home, gathered is closed when that is none; nil while nobody waits.
	expected int           // protected by viewsMu
	gathered chan struct{} // protected by viewsMu
	viewed   atomic.Int32
	// viewTurn counts how often pages were taken for a view. Protected by mu.
	viewTurn uint64

	published publication
	// releases counts what devices published. Protected by mu.
	releases uint64

	counters Counters

	stuckNoted atomic.Bool // the log says that the file is stuck
	// seen is what the status saw of the file last. looking is closed when somebody who waits for mu has looked again.
	seen    atomic.Pointer[glance]
	lookMu  sync.Mutex
	looking chan struct{} // protected by lookMu; nil where nobody waits
}

// Name is the path below the mountpoint at the time when the file was last mapped.
func (f *File) Name() string { return *f.path.Load() }

func (f *File) setName(name string) { f.path.Store(&name) }

// Detached reports that devices hold nothing of the file any more, so that requests need not consult f.
func (f *File) Detached() bool { return f.detached.Load() }

// Size returns home's size as this mount left it.
func (f *File) Size() int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.size
}

// Coming returns at most how many pages home may get from devices soon, of those that were released.
func (f *File) Coming() page.Index { return page.Index(f.coming.Load()) }

// open returns the File of src with a user counted, which done gives back. It makes the File where there is none, and
// opens home for writing where writable asks for it and it was not.
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
	f.kernel = src.Kernel()
	if writable && !f.home.Writable() {
		var home Home
		if home, err = src.OpenHome(true); err == nil {
			_ = f.closeHomeLocked(f.home)
			f.home = home
		}
	}
	if home, cares := f.home.(UserHome); cares && writable && err == nil {
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

// newFile registers a File for src with one user, or joins the one that somebody else registered meanwhile.
func (c *Cache) newFile(ctx context.Context, src Source, writable bool) (*File, error) {
	home, err := src.OpenHome(writable)
	if err != nil {
		return nil, err
	}
	f := &File{
		c:        c,
		id:       src.ID(),
		users:    1,
		home:     home,
		kernel:   src.Kernel(),
		holdings: make(map[versions.Owner]*holding),
		drains:   make(map[lrc.DrainID]chan struct{}),
		mappings: make(map[*Mapping]struct{}),
		turn:     make(chan struct{}, 1),
	}
	f.setName(src.Name())
	f.serial, f.bases.memory = c.serials.Add(1), &c.pages
	f.coldWay = c.coldWay(f.id.Dev)
	f.clean = c.clean.NewFile(f.serial, executor{f})
	f.asked.Store(1) // by programs that write already
	f.lrc.HeldUnasked, f.lrc.Changed = c.writeBack, f.changed
	if err := f.meetHomeLocked(); err != nil { // nobody else knows f yet
		_ = home.Close()
		return nil, err
	}
	c.mu.Lock()
	if other := c.files[f.id]; other != nil {
		other.users++
		c.mu.Unlock()
		_ = home.Close()
		return other, nil
	}
	c.publications.meet(f)
	c.files[f.id] = f
	c.mu.Unlock()
	// Requests that did not consult f are over when Attach returns; what they changed is not somebody else's doing.
	src.Attach(f)
	err = f.mu.LockIn(ctx)
	if err == nil {
		err = f.meetHomeLocked()
		f.mu.Unlock()
	}
	if err != nil {
		f.leave(ctx)
		return nil, err
	}
	return f, nil
}

// leave takes a user back. Somebody else may use the File.
func (f *File) leave(ctx context.Context) {
	f.c.mu.Lock()
	f.users--
	f.c.mu.Unlock()
	f.whenFree(ctx, f.dropIdleLocked)
}

// meetHomeLocked takes home as it is: no device holds anything yet.
func (f *File) meetHomeLocked() (err error) {
	if f.changes, err = f.home.Look(); err != nil {
		return err
	}
	return f.noteSizeLocked(0, math.MaxInt64)
}

// noteSizeLocked takes the size that a change through the mount gave home, which is least or more, and no more than
// most. The rest is somebody else's doing in SOURCE, and will be noticed as that.
func (f *File) noteSizeLocked(least, most int64) error {
	sig, err := f.home.Signature()
	if err != nil {
		return err
	}
	f.size = min(max(sig.Size, least), most)
	return nil
}

// dropIdleLocked frees the extents of an orphan that nobody maps, and detaches a File that holds nothing and that
// nobody is about to map.
func (f *File) dropIdleLocked() {
	if f.detached.Load() {
		return
	}
	if f.orphan {
		for _, h := range f.holdings {
			for _, x := range h.sorted() {
				if !f.movesLocked(x) { // programs may want it back
					f.loseExtentLocked(x)
				}
			}
		}
		f.dropViews()
	}
	if len(f.mappings) > 0 || f.viewed.Load() > 0 || !f.orphan && (len(f.unreported) > 0 || f.flights.any()) {
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
	f.c.memory.charge(memoryStates, -f.states)
	f.clean.Close()
	if err := f.closeHomeLocked(f.home); err != nil {
		f.c.log.Warn("closing the backing file", "file", f.Name(), "error", err)
	}
}

// detachLocked takes the File out of the Cache unless somebody is about to map it.
func (f *File) detachLocked() bool {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if f.users > 0 || f.c.files[f.id] != f {
		return false
	}
	delete(f.c.files, f.id)
	f.detached.Store(true)
	if !f.orphan {
		f.c.publications.leave(f)
	}
	if letGo := f.letGo.Load(); letGo != nil {
		(*letGo)()
	}
	return true
}

// WhenDetached has letGo called when the File is detached, in the place of what it was told before: whoever keeps the
// File for requests to consult needs it no more then, and it takes some KiB. letGo must not block, and may be called
// twice.
func (f *File) WhenDetached(letGo func()) {
	f.letGo.Store(&letGo)
	if f.Detached() {
		letGo()
	}
}

// mappedLocked returns how many mappings clients have.
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

// readHomeLocked reads the pages of rg from home, flights included, into p, which has rg.Bytes() bytes. What lies past
// end of file reads as zero.
func (f *File) readHomeLocked(rg page.Range, p []byte) error {
	n, err := f.homeLocked().ReadAt(p, rg.Offset())
	if err != nil {
		return err
	}
	clear(p[n:])
	return nil
}

// fileRange returns the pages that hold bytes of the file.
func (f *File) fileRangeLocked() page.Range { return page.Range{End: page.Count(f.size)} }

// waitDrains returns once no page of rg that was draining at the time of the call drains any more, not even again for
// the same release.
func (f *File) waitDrains(ctx context.Context, rg page.Range) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	drains := f.drainsLocked(rg)
	f.mu.Unlock()
	for _, ch := range drains {
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// drainsLocked returns what is closed when pages of rg, which drain now, do so no more.
func (f *File) drainsLocked(rg page.Range) (drains []chan struct{}) {
	for _, id := range f.lrc.Draining(rg) {
		drains = append(drains, f.drains[id])
	}
	return drains
}
