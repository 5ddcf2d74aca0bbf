package cleanread

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// When says when devices serve CPU reads of pages that home has.
type When uint8

const (
	// Auto serves reads from devices if that is faster.
	Auto When = iota
	// Always serves reads from devices if that is possible, even if the host's page cache has the pages. It is for
	// tests and measurements.
	Always
	// Off serves reads from home.
	Off
)

// words are the names of the values of When.
var words = [...]string{Auto: "auto", Always: "always", Off: "off"}

// Words returns the words that Named knows.
func Words() []string { return words[:] }

// Named returns the value of When with this name. It panics if word is not in Words.
func Named(word string) When {
	i := slices.Index(words[:], word)
	if i < 0 {
		panic("no kind of device reads: " + word)
	}
	return When(i)
}

// Options configures a Cache.
type Options struct {
	When When
	// Devices are the devices that may serve reads.
	Devices []*Device
	// Limit is the most bytes of chunks.
	Limit int64
	// Charge is called when the memory of chunks grows by n bytes; n may be negative. Fits reports whether the host has
	// memory to spare.
	Charge func(n int64)
	Fits   func() bool
}

// Device is a device that may serve reads.
type Device struct {
	Moves *mover.Device
	Key   *gpubackend.DigestKey
	// Engines says that a copy needs no processor of the host.
	Engines bool
	Lost    func() bool
	// overhead is the cost of the reader's own work besides waiting for the device: it compares, and copies once more.
	overhead *mover.Place
}

const (
	// A reader waits for a copy from a device for patienceTimes its expected time, but no shorter and no longer than
	// these bounds.
	leastPatience = 20 * time.Millisecond
	mostPatience  = 250 * time.Millisecond
	patienceTimes = 8

	// These are assumed for Device.overhead until something is measured.
	overheadLatency   = time.Microsecond
	overheadBandwidth = 10e9
)

// Cache serves the CPU reads of one mount. Its methods may be called from any goroutine.
type Cache struct {
	Options
	// Patience is the least time that a reader waits for a copy, and ChunkPatience the longest time that it waits for a
	// chunk. Age is the least time that an unread chunk stays. Tests change them before they read.
	Patience, ChunkPatience, Age time.Duration

	disk *mover.Place // the place that homes are read from
	// trials are those of small and large reads, around those of reads that bring a chunk.
	trials, around cost.Trials
	// fetchesMore says that fetchesMoreFrom is true for some device.
	fetchesMore bool
	store       *chunkStore // nil if devices serve no reads
	bytes       atomic.Int64
	memory      chunkMemory
	pushes      atomic.Int32 // pushes of chunks under way

	mu     sync.Mutex
	closed bool           // protected by mu
	calls  sync.WaitGroup // goroutines in the background
}

// New makes a Cache.
func New(o Options) (c *Cache, err error) {
	if len(o.Devices) == 0 {
		o.When = Off
	}
	o.Limit = max(o.Limit, ChunkSize)
	c = &Cache{Options: o, Patience: leastPatience, ChunkPatience: chunkPatience, Age: chunkAge, disk: mover.NewDisk()}
	for _, d := range o.Devices {
		d.overhead = mover.NewPlace(overheadLatency, overheadBandwidth)
	}
	c.fetchesMore = slices.ContainsFunc(o.Devices, c.fetchesMoreFrom)
	if o.When != Off {
		c.store, err = newChunkStore(c.Limit)
	}
	return c, err
}

// Disk returns the known cost of reads of home.
func (c *Cache) Disk() *mover.Place { return c.disk }

// Bytes returns the bytes of chunks.
func (c *Cache) Bytes() int64 { return c.bytes.Load() }

// LongestPatience returns the longest time that a reader waits for a copy from a device.
func (c *Cache) LongestPatience() time.Duration { return c.patience(mostPatience) }

// patience returns how long a reader waits for a copy with this expected time.
func (c *Cache) patience(thought time.Duration) time.Duration {
	return max(min(patienceTimes*thought, mostPatience), c.Patience)
}

// inBackground calls do in a goroutine that Wait waits for. It returns false after Stop.
func (c *Cache) inBackground(do func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.calls.Add(1)
	go func() {
		defer c.calls.Done()
		do()
	}()
	return true
}

// Stop lets no more background work begin.
func (c *Cache) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// Wait waits for the background work: copies from devices and reads of home.
func (c *Cache) Wait() { c.calls.Wait() }

// Close frees the memory of chunks. Later reads are served, but nothing is kept for them.
func (c *Cache) Close() {
	c.store.close()
	c.memory.free()
}
