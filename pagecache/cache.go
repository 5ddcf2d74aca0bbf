package pagecache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/home"
	"github.com/gaiafs/gaiafs/pagecache/live"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/versions"
)

// Defaults of Options.
const (
	DefaultWriteBackInterval = 2 * time.Second
	DefaultHostMemory        = 256 << 20
)

// Options configures a Cache.
type Options struct {
	// Devices are the devices that files may be mapped on. The Cache closes them in Close.
	Devices []gpubackend.Device
	// HostMemory limits, in bytes, the host memory that grows with use (account). 0 stands for DefaultHostMemory.
	HostMemory int64
	// WriteBackInterval is the longest time before released bytes are written home. 0 stands for
	// DefaultWriteBackInterval.
	WriteBackInterval time.Duration
	// DeviceReads says when devices serve CPU reads of pages that home has too. Read-ahead from devices takes at most
	// half of HostMemory, and at most 4 GiB.
	DeviceReads DeviceReads
	// WriteBack says that the kernel caches writes. It may then hold pages that it never read.
	WriteBack bool
	// BufferedReads fills devices through the host's page cache even if home is a DirectReader.
	BufferedReads bool
	// NeighbourLinks fills views over the links of other, idle devices too.
	NeighbourLinks bool
	// TrustUsers lets all users share memory, whatever rights to the file they have or had.
	TrustUsers bool
	// Hold, if not nil, is called before released bytes start to wait for being brought home; end is called when none
	// wait any more. Neither may block. A release waits until held is closed, but at most a second.
	Hold func() (held <-chan struct{}, end func())
	// UserShare is the part of each device's memory that the programs of one user may map if MapRequest.Limited is set.
	// 0 stands for all of it.
	UserShare float64
	// Eviction names the rule that says which extent goes first when a device is full: one of EvictionNames. "" stands
	// for DefaultEviction.
	Eviction string
	// Placement says when extents that brackets use move to the device's own memory.
	Placement PlacementPolicy
	// Transfers names the discipline that says which transfer of a device begins next: one of TransferNames. "" stands
	// for DefaultTransfers.
	Transfers string
	// LiveBudget lets each device's budget follow the memory use of other programs, up to the budget that the device
	// was made with.
	LiveBudget bool
	// Preferences say where files should be kept.
	Preferences []Preference
	// Tenants lists the tenants with unequal shares, as checked by CheckTenants. All others have weight 1.
	Tenants []Tenant
	// PinnedMemory is how much host memory may be pinned, in bytes, for extents that do not fit on devices. 0 means
	// none.
	PinnedMemory int64
	// Log receives errors and events that no caller waits for. nil discards them.
	Log *slog.Logger

	stuckAfter time.Duration // 0 stands for defaultStuckAfter
	pinTick    time.Duration // 0 stands for the constant pinTick
}

// Cache is the page cache of one mount. Its methods may be called from any goroutine.
type Cache struct {
	log       *slog.Logger
	interval  time.Duration
	writeBack bool
	// neighbourLinks and leastRelayed are immutable. Tests set leastRelayed; otherwise it is the constant.
	neighbourLinks bool
	leastRelayed   int64
	// trustUsers is immutable.
	trustUsers bool

	devices []*device // immutable
	// pinned is the host memory that devices use when their own is full.
	pinned *residency.Pinned
	// preferences were set by SetPreferences; nil before the first call.
	preferences atomic.Pointer[[]Preference]

	mu    sync.Mutex
	files map[FileID]*File // protected by mu
	heats heats            // protected by mu
	// viewsByKey has all views. Protected by mu.
	viewsByKey map[viewKey]*View
	viewUses   uint64  // counts uses of views; protected by mu
	closed     bool    // protected by mu
	losses     []*Loss // protected by mu; everything that was lost with devices so far

	leastPeer int64 // immutable; tests lower it
	// leastFlight is the number of pages that a read must fetch from devices before they fly. landPause, relockAfter
	// and hotAge are the constants of these names unless a test changes them. All are immutable.
	leastFlight int64
	landPause   time.Duration
	relockAfter time.Duration
	hotAge      time.Duration
	pinTick     time.Duration // immutable
	// gather is gatherTime unless a test changes it. Immutable.
	gather     func(size int64) time.Duration
	idleRelays idleRelays
	// noPeer is the set of devicePairs that turned out to have no direct path.
	noPeer sync.Map

	clean      *cleanread.Cache
	stuckAfter time.Duration // immutable
	serials    atomic.Uint64 // numbers Files

	publications publications
	// live publishes transfers and events to watchers.
	live live.Feed

	memory   account
	pages    pageMemory // of bases
	homes    home.Mount
	counters Counters
	// recording receives accesses; nil while nobody records.
	recording atomic.Pointer[Recording]

	background sync.WaitGroup
	lanes      lanes
	life       context.Context // of the background's work; stop ends it
	stop       context.CancelFunc
	relieve    chan struct{} // base copies take too much memory
	lost       chan struct{} // a device was lost
	failed     chan struct{} // bytes could not be brought home
	idle       chan struct{} // the last mapping ended
	mapped     atomic.Int64  // mappings
	flushing   chan struct{} // holds one element while a Flush runs
	hold       pendingHold
}

// deviceMemory is the part of gpubackend.Device that the Cache calls itself. The mover makes the calls that move bytes.
type deviceMemory interface {
	Key() *gpubackend.DigestKey
	AllocStaging(size int64) (gpubackend.Memory, error)
	Used() int64
	Free() (int64, error)
	Digests(ctx context.Context, mem gpubackend.Memory, off int64, out []gpubackend.Digest) error
	Modified(ctx context.Context, scans []gpubackend.Scan) ([][]page.Range, error)
	HostBuffer(n int) (buf []byte, giveBack func(), err error)
	LockHost(mem []byte) (unlock func() error, err error)
	Close() error
}

// zeroed is the device from which package residency allocates memory. Its Zero goes through the mover.
type zeroed struct {
	gpubackend.Device
	moves *mover.Device
}

func (z zeroed) Zero(ctx context.Context, mem gpubackend.Memory, off, n int64) error {
	return z.moves.Zero(ctx, mover.Acquire, mem, off, n)
}

// device is a gpubackend.Device and what the Cache knows of it.
type device struct {
	deviceMemory
	// moves makes all transfers to, from and within the memory, and measures how long CPU reads take. Immutable.
	moves *mover.Device
	info  gpubackend.Info
	owner versions.Owner
	lost  atomic.Bool
	// transfers is the name of the discipline that moves uses.
	transfers atomic.Pointer[string]
	// zeros are the digests of zero pages. Immutable.
	zeros []gpubackend.Digest
	// room accounts for the memory. serves answers CPU reads from the device.
	room   *residency.Device
	serves *cleanread.Device
	// kept are the brackets that clients keep open.
	kept kept
}

// HighestDevice is the highest number that a device may have.
const HighestDevice = versions.MaxGPU

// New makes a Cache over the devices. It starts background goroutines, which Close ends.
func New(o Options) (*Cache, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	c := &Cache{
		log:         o.Log,
		interval:    o.WriteBackInterval,
		leastPeer:   leastPeer,
		gather:      gatherTime,
		leastFlight: leastFlightFor(o.DeviceReads),
		landPause:   landPause,
		relockAfter: relockAfter,
		hotAge:      hotAge,
		pinTick:     cmp.Or(o.pinTick, pinTick),
		writeBack:   o.WriteBack,

		stuckAfter: cmp.Or(o.stuckAfter, defaultStuckAfter),

		homes: home.Mount{
			Log: o.Log, Buffered: o.BufferedReads, LeastParallel: home.LeastParallelFor(runtime.GOMAXPROCS(0)),
		},
		neighbourLinks: o.NeighbourLinks, leastRelayed: leastRelayed, trustUsers: o.TrustUsers,

		files: make(map[FileID]*File), heats: make(heats), viewsByKey: make(map[viewKey]*View),

		relieve:  make(chan struct{}, 1),
		lost:     make(chan struct{}, 1),
		idle:     make(chan struct{}, 1),
		failed:   make(chan struct{}, 1),
		flushing: make(chan struct{}, 1),
		hold:     pendingHold{begin: o.Hold},
	}
	c.memory.limit, c.pinned = o.HostMemory, residency.NewPinned(o.PinnedMemory)
	c.pinned.SetShare(cmp.Or(o.UserShare, 1))
	seen := make(map[int]bool)
	for _, d := range o.Devices {
		info := d.Info()
		if seen[info.Ordinal] {
			return nil, fmt.Errorf("two devices have the number %d", info.Ordinal)
		}
		seen[info.Ordinal] = true
		own, err := c.newDevice(d, info, o)
		if err != nil {
			return nil, err
		}
		c.devices = append(c.devices, own)
	}
	var err error
	if c.clean, err = c.newCleanCache(o.DeviceReads); err != nil {
		return nil, err
	}
	sort.Slice(c.devices, func(i, j int) bool { return c.devices[i].info.Ordinal < c.devices[j].info.Ordinal })
	c.SetPreferences(o.Preferences)
	if o.LiveBudget {
		c.SetLiveBudget()
	}
	c.start()
	return c, nil
}

// start starts the background goroutines.
func (c *Cache) start() {
	ctx, stop := context.WithCancel(context.Background())
	c.life, c.stop = ctx, stop
	for _, d := range c.devices {
		c.attend(ctx, d)
	}
	c.background.Go(func() { c.run(ctx) })
}

// complete fills in defaults and rejects invalid options.
func (o *Options) complete() error {
	if o.HostMemory == 0 {
		o.HostMemory = DefaultHostMemory
	}
	if o.WriteBackInterval == 0 {
		o.WriteBackInterval = DefaultWriteBackInterval
	}
	if o.UserShare < 0 || o.UserShare > 1 {
		return errors.New("the share of a user must be between 0 and 1")
	}
	if o.HostMemory < 0 || o.PinnedMemory < 0 || o.WriteBackInterval < 0 {
		return errors.New("the host memory, the pinned memory and the write-back interval must not be negative")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// newDevice makes the Cache's record of a device.
func (c *Cache) newDevice(d gpubackend.Device, info gpubackend.Info, o Options) (own *device, err error) {
	own = &device{
		deviceMemory: d, info: info, owner: versions.GPU(info.Ordinal),
		zeros: slices.Repeat([]gpubackend.Digest{d.Key().Sum(zeroPage[:])}, zeroPages),
	}
	transfers := cmp.Or(o.Transfers, DefaultTransfers)
	order, err := schedule.New(transfers, nil)
	if err != nil {
		return nil, err
	}
	own.transfers.Store(&transfers)
	own.moves = mover.NewDevice(d, order, &c.live, func(err error) { c.lose(own, err) })
	delay, err := o.Placement.delay()
	if err != nil {
		return nil, err
	}
	own.room, err = residency.New(zeroed{d, own.moves}, residency.Options{
		Share: cmp.Or(o.UserShare, 1), Eviction: o.Eviction, Log: o.Log, Pinned: c.pinned, Tenants: o.Tenants,
		Recall: own.kept.recall, Delay: delay,
		Patience: func() time.Duration { return c.clean.LongestPatience() }, Name: processName,
	})
	return own, err
}

// Live returns the feed of what the mount does, for watchers. It returns nil if c is nil.
func (c *Cache) Live() *live.Feed {
	if c == nil {
		return nil
	}
	return &c.live
}

// Stage makes devices with copy engines prepare what a first load needs: host memory to read into, and the paths to
// other devices. It works in the background, so the mount can be used at once. A device frees this memory if nothing is
// loaded for a while. Close waits for Stage to end.
func (c *Cache) Stage(ctx context.Context) {
	const files = 4 // that are loaded at once; several devices have memory for fewer files each
	var devices []*device
	for _, d := range c.devices {
		if d.info.CopyEngines {
			devices = append(devices, d)
		}
	}
	relays := 0
	if c.neighbourLinks {
		relays = relaysEach * (len(devices) - 1)
	}
	for _, d := range devices {
		c.background.Go(func() {
			start := time.Now()
			c.openPaths(ctx, d)
			if err := d.moves.Stage(ctx, max(1, files/len(devices)), relays); err != nil {
				c.log.Debug("no host memory for loads yet", "device", d.info.Ordinal, "error", err)
				return
			}
			c.log.Info("host memory for loads is ready", "device", d.info.Ordinal,
				"took", time.Since(start).Round(time.Millisecond).String())
		})
	}
}

// HostMemory returns the bytes of Options.HostMemory.
func (c *Cache) HostMemory() int64 { return c.memory.limit }

// Devices describes the devices, in ascending order of their numbers.
func (c *Cache) Devices() []gpubackend.Info {
	infos := make([]gpubackend.Info, len(c.devices))
	for i, d := range c.devices {
		infos[i] = d.info
	}
	return infos
}

// device returns the device with the UUID, or, if the UUID is zero, the device with the number.
func (c *Cache) device(kind gpubackend.Kind, ordinal int, uuid gpubackend.UUID) (*device, error) {
	byUUID := uuid != gpubackend.UUID{}
	for _, d := range c.devices {
		if byUUID && d.info.UUID != uuid || !byUUID && d.info.Ordinal != ordinal || kind != 0 && d.info.Kind != kind {
			continue
		}
		if err := d.gone(); err != nil {
			return nil, err
		}
		return d, nil
	}
	if byUUID {
		return nil, fail(syscall.ENODEV,
			"the mount does not use %s; 'gaiafs status' lists its devices, --gpus chooses them", uuid)
	}
	if len(c.devices) == 0 {
		return nil, fail(syscall.ENODEV, "there is no device %d: the mount has no devices (--gpus none)", ordinal)
	}
	if kind != 0 {
		return nil, fail(syscall.ENODEV, "the mount has no device %d of kind %s", ordinal, kind)
	}
	return nil, fail(syscall.ENODEV, "there is no device %d: the mount has %d, numbered %d to %d",
		ordinal, len(c.devices), c.devices[0].info.Ordinal, c.devices[len(c.devices)-1].info.Ordinal)
}

// Lookup returns the File of id, or nil if no device holds anything of it.
func (c *Cache) Lookup(id FileID) *File {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.files[id]
}

// Forget drops everything that devices hold of a file whose last name and last open descriptor are gone. Existing
// mappings keep what they map until they end. Forget does not wait for devices, since the caller may hold locks that
// requests need. If nobody works on the file, home is closed when Forget returns, so its space is free.
func (c *Cache) Forget(id FileID) {
	c.publications.forget(id)
	f := c.Lookup(id)
	if f == nil {
		return
	}
	if !f.mu.TryLock() {
		c.lanes.do(f, choreForget, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.orphan = true
			f.dropIdleLocked()
		})
		return
	}
	defer f.mu.Unlock()
	free := f.keepUnmappedLocked()
	dropped := make(chan struct{})
	defer close(dropped)
	// f is still in the Cache's list, so Close waits for the task.
	c.lanes.do(f, choreFree, func() {
		<-dropped // otherwise the caller would be the last user
		free()
	})
	f.orphan = true
	f.dropIdleLocked()
}

// keepUnmappedLocked makes the caller a user of all extents that no client maps. free ends this use; it may wait for
// devices and needs no lock.
func (f *File) keepUnmappedLocked() (free func()) {
	var kept []*extent
	for _, h := range f.holdings {
		for _, x := range h.extents {
			if x.Mapped() == 0 {
				x.Hold()
				kept = append(kept, x)
			}
		}
	}
	return func() {
		for _, x := range kept {
			x.LetGo()
		}
	}
}

func (c *Cache) snapshotFiles() []*File {
	c.mu.Lock()
	defer c.mu.Unlock()
	files := make([]*File, 0, len(c.files))
	for _, f := range c.files {
		files = append(files, f)
	}
	return files
}

// waitWork waits for all work that uses devices. No new work begins.
func (c *Cache) waitWork() {
	c.background.Wait() // it gives the lanes work
	c.lanes.work.Wait()
	c.background.Wait() // lanes, and reads that came in late, may have started work
	c.homes.Reads.Wait()
}

// lastWait is how long Close waits after the end of its context for work that may just end.
const lastWait = 100 * time.Millisecond

// waitIn calls wait, and returns when it has returned, or ctx's error if it has not soon after the end of ctx.
func waitIn(ctx context.Context, wait func()) error {
	done := make(chan struct{})
	go func() {
		wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-done:
		return nil
	case <-time.After(lastWait):
		return ctx.Err()
	}
}

func (c *Cache) snapshotLosses() []*Loss {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.losses)
}

// Close brings everything released home, frees all device memory and closes the devices. It first releases mappings
// that still exist. It blocks until this is done or ctx ends. The error names every file that lost released bytes, now
// or earlier with a device.
func (c *Cache) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	c.clean.Stop()
	c.stop()

	errs, all := c.closeFiles(ctx)
	for _, l := range c.snapshotLosses() {
		errs = append(errs, errors.New(l.String()))
	}
	c.endCopies()
	if !all {
		return errors.Join(errs...) // a goroutine may still use the devices
	}
	if err := waitIn(ctx, c.waitWork); err != nil { // the pages of a file are being locked, and its home hangs
		return errors.Join(append(errs, fmt.Errorf("the daemon is still busy with a file: %w", err))...)
	}
	c.pages.free()
	c.pinned.Trim(0)
	c.idleRelays.trim(0)
	for _, d := range c.devices {
		if err := d.Close(); err != nil {
			errs = append(errs, fmt.Errorf("device %d: %w", d.info.Ordinal, err))
		}
	}
	return errors.Join(errs...)
}

// closeFiles brings everything released home and drops the files. all is false if some were left when ctx ended.
func (c *Cache) closeFiles(ctx context.Context) (errs []error, all bool) {
	errs, left := c.onFiles(ctx, c.snapshotFiles(), choreClose, true, func(f *File) error { return f.close(ctx) })
	for _, f := range left {
		errs = append(errs, fmt.Errorf("bytes of %s that devices wrote may be lost: %w", Printable(f.Name()),
			f.notAnswered()))
	}
	return errs, len(left) == 0
}

// onFiles calls do for each file in its own lane, so a file that hangs delays no other. It returns the errors, and the
// files that were not done in time: when ctx ended or, if patient is false, when all remaining files were blocked.
func (c *Cache) onFiles(ctx context.Context, files []*File, what chore, patient bool,
	do func(*File) error) (errs []error, late []*File) {
	left := make(map[*File]bool)
	type end struct {
		f   *File
		err error
	}
	ends := make(chan end)
	given := make(chan struct{}) // closed when nobody reads ends any more
	defer close(given)
	for _, f := range files {
		left[f] = true
		c.lanes.do(f, what, func() {
			select {
			case ends <- end{f, do(f)}:
			case <-given:
			}
		})
	}
	tick := time.NewTicker(c.stuckAfter)
	defer tick.Stop()
	for len(left) > 0 {
		select {
		case e := <-ends:
			delete(left, e.f)
			errs = append(errs, e.err)
		case <-tick.C:
			c.lanes.look()
			blocked := 0
			for f := range left {
				f.noteStuck()
				if !patient && c.lanes.blocked(f) {
					blocked++
				}
			}
			if blocked == len(left) {
				return errs, slices.Collect(maps.Keys(left))
			}
		case <-ctx.Done():
			return errs, slices.Collect(maps.Keys(left))
		}
	}
	return errs, nil
}

// close ends the mappings of the file, brings home what was released, and drops the file.
func (f *File) close(ctx context.Context) error {
	var errs []error
	for _, m := range f.snapshotMappings() {
		if err := m.Unmap(ctx); err != nil {
			errs = append(errs, fmt.Errorf("release %s on device %d: %w", f.Name(), m.dev.info.Ordinal, err))
		}
	}
	for _, v := range f.views.snapshot() {
		for _, m := range v.snapshotMappings() {
			_ = m.Unmap(ctx) // it has nothing to release
		}
	}
	err := f.collectWhatCan(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		errs = append(errs, fmt.Errorf("%d bytes of %s that devices wrote are lost: %w", f.waitingBytesLocked(),
			Printable(f.Name()), err))
	}
	f.orphan = true
	f.dropIdleLocked()
	return errors.Join(errs...)
}

// failure is an error for a client: an errno for the program and a sentence for the user.
type failure struct {
	errno syscall.Errno
	text  string
	cause error // or nil
}

func fail(errno syscall.Errno, format string, args ...any) error {
	return &failure{errno: errno, text: fmt.Sprintf(format, args...)}
}

func (e *failure) Error() string { return e.text }

func (e *failure) Unwrap() []error {
	if e.cause == nil {
		return []error{e.errno}
	}
	return []error{e.errno, e.cause}
}
