package pagecache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
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
	// HostMemory is the number of bytes that what grows with the work of others may take (account). 0 stands for
	// DefaultHostMemory.
	HostMemory int64
	// WriteBackInterval is the age at which released bytes are home at the latest. 0 stands for
	// DefaultWriteBackInterval.
	WriteBackInterval time.Duration
	// DeviceReads says when CPU reads of pages that home has are served from devices. What is read ahead from them
	// takes half of HostMemory at most, and 4 GiB.
	DeviceReads DeviceReads
	// WriteBack says that the kernel caches writes, so that it may hold pages that it never asked for.
	WriteBack bool
	// BufferedReads has devices filled through the host's page cache, also from homes that are DirectReaders.
	BufferedReads bool
	// NeighbourLinks has views filled over the links of other devices, too, while these are idle.
	NeighbourLinks bool
	// TrustUsers has all users share memory, whoever they are and whatever became of their rights.
	TrustUsers bool
	// Hold, if it is not nil, is called before released bytes begin to wait for being brought home, and end when none
	// wait any more. Neither may block. A release waits until held is closed, but no longer than a second.
	Hold func() (held <-chan struct{}, end func())
	// UserShare is the part of each device's memory that the programs of one user may map, where MapRequest.Limited
	// says so. 0 stands for all of it.
	UserShare float64
	// Eviction is the name of the rule that says which extent goes first when a device is full, one of EvictionNames.
	// "" stands for DefaultEviction.
	Eviction string
	// Transfers is the name of the discipline that says which transfer of a device begins next, one of TransferNames.
	// "" stands for DefaultTransfers.
	Transfers string
	// LiveBudget has each device's budget follow what other programs take of its memory, up to what the device was made
	// with.
	LiveBudget bool
	// Preferences say where files are to be.
	Preferences []Preference
	// Tenants are those of unequal shares, CheckTenants found nothing wrong. Others have weight 1.
	Tenants []Tenant
	// PinnedMemory is the bytes of the host's memory that may be pinned for what devices have no room for. 0: none.
	PinnedMemory int64
	// Log receives what nobody waits for. nil discards.
	Log *slog.Logger

	stuckAfter time.Duration // 0 stands for defaultStuckAfter
}

// Cache is the page cache of one mount. Its methods may be called from any goroutine.
type Cache struct {
	log       *slog.Logger
	interval  time.Duration
	writeBack bool
	// bufferedReads and neighbourLinks are immutable, and so is leastRelayed: of a constant's value, but in tests.
	bufferedReads, neighbourLinks bool
	leastRelayed                  int64
	// trustUsers is immutable.
	trustUsers bool

	devices []*device // immutable
	// pinned is the memory of the host that devices use where they have no room.
	pinned *residency.Pinned
	// preferences are those of SetPreferences; nil before.
	preferences atomic.Pointer[[]Preference]

	mu    sync.Mutex
	files map[FileID]*File // protected by mu
	// coldWays are by the numbers of filesystems; protected by mu.
	coldWays map[uint64]*mover.ColdWay
	// viewsByKey has the views that there are. Protected by mu.
	viewsByKey map[viewKey]*View
	closed     bool    // protected by mu
	losses     []*Loss // protected by mu; what was lost with devices so far
	// noDirectReasons are why files are read through the host's page cache although they need not be. Protected by mu.
	noDirectReasons []string

	leastPeer int64 // immutable: of a constant's value, but in tests
	// leastFlight is how many pages a read needs from devices for them to fly. landPause is the constant of
	// that name, but in tests. Immutable.
	leastFlight int64
	landPause   time.Duration
	// gather is gatherTime, but in tests. Immutable.
	gather func(size int64) time.Duration
	// noPeer has the devicePairs that turned out to have no direct way.
	noPeer sync.Map

	clean      *cleanread.Cache
	stuckAfter time.Duration // immutable
	serials    atomic.Uint64 // of Files

	publications publications
	// live shows what goes on to those who watch.
	live live.Feed

	memory   account
	pages    pageMemory // of bases
	counters Counters
	// recording is what accesses are written down in, nil while nobody asks for it.
	recording atomic.Pointer[Recording]

	background sync.WaitGroup
	lanes      lanes
	reads      sync.WaitGroup // of home, that go on without File.mu on behalf of mappings
	stop       context.CancelFunc
	relieve    chan struct{} // base copies take too much
	lost       chan struct{} // a device was lost
	failed     chan struct{} // bytes could not be brought home
	idle       chan struct{} // the last mapping ended
	mapped     atomic.Int64  // mappings
	flushing   chan struct{} // holds an element while a Flush goes on
	hold       pendingHold
}

// deviceMemory is what the Cache does with a gpubackend.Device but for moving bytes, which is the mover's.
type deviceMemory interface {
	Key() *gpubackend.DigestKey
	Alloc(size int64) (gpubackend.Memory, error)
	Used() int64
	Digests(ctx context.Context, mem gpubackend.Memory, off int64, out []gpubackend.Digest) error
	Modified(ctx context.Context, scans []gpubackend.Scan) ([][]page.Range, error)
	HostBuffer(n int) (buf []byte, giveBack func(), err error)
	Close() error
}

// zeroed is a device that package residency allocates memory of. The mover zeroes it.
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
	// moves has all transfers to, from and within the memory, and knows what CPU reads take. Immutable.
	moves *mover.Device
	info  gpubackend.Info
	owner versions.Owner
	lost  atomic.Bool
	// transfers is the name of the discipline of moves.
	transfers atomic.Pointer[string]
	// zeros are the digests of pages of zeros. Immutable.
	zeros []gpubackend.Digest
	// room is who has how much of the memory, serves what CPU reads ask.
	room   *residency.Device
	serves *cleanread.Device
	// kept are the brackets that clients keep.
	kept kept
}

// HighestDevice is the highest number that a device may have.
const HighestDevice = versions.MaxGPU

// New makes a Cache over the devices. It starts one goroutine, which Close ends.
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
		writeBack:   o.WriteBack,

		stuckAfter: cmp.Or(o.stuckAfter, defaultStuckAfter),

		bufferedReads: o.BufferedReads, neighbourLinks: o.NeighbourLinks, leastRelayed: leastRelayed,
		trustUsers: o.TrustUsers,

		files: make(map[FileID]*File), coldWays: make(map[uint64]*mover.ColdWay), viewsByKey: make(map[viewKey]*View),

		relieve:  make(chan struct{}, 1),
		lost:     make(chan struct{}, 1),
		idle:     make(chan struct{}, 1),
		failed:   make(chan struct{}, 1),
		flushing: make(chan struct{}, 1),
		hold:     pendingHold{begin: o.Hold},
	}
	c.memory.limit, c.pinned = o.HostMemory, residency.NewPinned(o.PinnedMemory)
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
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	c.SetPreferences(o.Preferences)
	if o.LiveBudget {
		c.SetLiveBudget()
	}
	for _, d := range c.devices {
		c.background.Go(func() { c.tend(ctx, d) })
	}
	c.background.Go(func() { c.run(ctx) })
	return c, nil
}

// complete sets what was left out, and refuses what cannot be.
func (o *Options) complete() error {
	if o.HostMemory == 0 {
		o.HostMemory = DefaultHostMemory
	}
	if o.WriteBackInterval == 0 {
		o.WriteBackInterval = DefaultWriteBackInterval
	}
	if o.UserShare < 0 || o.UserShare > 1 {
		return errors.New("the share of a user must be between nothing and all")
	}
	if o.HostMemory < 0 || o.PinnedMemory < 0 || o.WriteBackInterval < 0 {
		return errors.New("the host memory, the pinned memory and the write-back interval must not be negative")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// newDevice returns what the Cache knows of a device.
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
	own.room, err = residency.New(zeroed{d, own.moves}, residency.Options{
		Share: cmp.Or(o.UserShare, 1), Eviction: o.Eviction, Log: o.Log, Pinned: c.pinned, Tenants: o.Tenants,
		Recall:   own.kept.recall,
		Patience: func() time.Duration { return c.clean.LongestPatience() },
	})
	return own, err
}

// Live returns what those watch who want to see what the mount does. It is nil where there is no Cache.
func (c *Cache) Live() *live.Feed {
	if c == nil {
		return nil
	}
	return &c.live
}

// Stage has devices with copy engines of their own make the host memory that a first load needs, in the background: the
// mount can be used meanwhile. A device gives it back when nothing was loaded for a while. Close waits for it.
func (c *Cache) Stage(ctx context.Context) {
	for _, d := range c.devices {
		if !d.info.CopyEngines {
			continue
		}
		c.background.Go(func() {
			start := time.Now()
			if err := d.moves.Stage(ctx); err != nil {
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

// device returns the device with the UUID, or with the number where the UUID is zero.
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

// Lookup returns the File of id, or nil where no device holds anything of it.
func (c *Cache) Lookup(id FileID) *File {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.files[id]
}

// Forget drops whatever devices hold of a file whose last name and last open descriptor are gone. Mappings that still
// exist keep what they map until they end. It does not wait for devices, for the caller may hold locks that requests
// need. Where nobody works on the file, home is closed when Forget returns, so that its space is free.
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
	// f is still one of the Cache's files, so that Close waits for the task.
	c.lanes.do(f, choreFree, func() {
		<-dropped // or the caller would be the last user
		free()
	})
	f.orphan = true
	f.dropIdleLocked()
}

// keepUnmappedLocked makes the caller a user of the extents that no client maps. free, which may wait for devices and
// needs no lock, ends that.
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

func (c *Cache) snapshotLosses() []*Loss {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.losses)
}

// Close brings everything released home, frees all device memory and closes the devices. Mappings that still exist are
// released first. It blocks for as long as that takes, or until ctx ends; the error names every file of which bytes
// could not be brought home, or were lost with a device at any time.
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
		return errors.Join(errs...) // somebody may still use the devices
	}
	c.lanes.work.Wait()
	c.background.Wait() // reads that came meanwhile may have started something
	c.reads.Wait()
	c.pages.free()
	c.pinned.Trim(0)
	for _, d := range c.devices {
		if err := d.Close(); err != nil {
			errs = append(errs, fmt.Errorf("device %d: %w", d.info.Ordinal, err))
		}
	}
	return errors.Join(errs...)
}

// closeFiles brings everything released home and gives up the files. all says that none was left when ctx ended.
func (c *Cache) closeFiles(ctx context.Context) (errs []error, all bool) {
	errs, left := c.onFiles(ctx, c.snapshotFiles(), choreClose, true, func(f *File) error { return f.close(ctx) })
	for _, f := range left {
		errs = append(errs, fmt.Errorf("bytes of %s that devices wrote may be lost: %w", Printable(f.Name()),
			f.notAnswered()))
	}
	return errs, len(left) == 0
}

// onFiles does something for each of files on its own, so that one that hangs holds up no other. It returns what went
// wrong, and the files that were left when ctx ended or, unless it is patient, when all that were left were blocked.
func (c *Cache) onFiles(ctx context.Context, files []*File, what chore, patient bool,
	do func(*File) error) (errs []error, late []*File) {
	left := make(map[*File]bool)
	type end struct {
		f   *File
		err error
	}
	ends := make(chan end)
	given := make(chan struct{}) // closed when nobody listens to ends any more
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

// close ends the mappings of the file, brings home what was released and gives the file up.
func (f *File) close(ctx context.Context) error {
	var errs []error
	for _, m := range f.snapshotMappings() {
		if err := m.Unmap(ctx); err != nil {
			errs = append(errs, fmt.Errorf("release %s on device %d: %w", f.Name(), m.dev.info.Ordinal, err))
		}
	}
	for _, v := range f.snapshotViews() {
		for _, m := range v.snapshotMappings() {
			_ = m.Unmap(ctx) // has nothing to release
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

// failure is an error for a client: an errno to act on and a sentence to read.
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
