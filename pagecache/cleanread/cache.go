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

// When says when CPU reads of pages that home has are served from devices.
type When uint8

const (
	// Auto serves them from devices where that is faster.
	Auto When = iota
	// Always serves them from devices wherever that is possible, even what the host's page cache has. It is for tests
	// and measurements.
	Always
	// Off serves them from home.
	Off
)

// words are the words for them.
var words = [...]string{Auto: "auto", Always: "always", Off: "off"}

// Words returns the words that Named knows.
func Words() []string { return words[:] }

// Named returns what the word stands for. It panics if that is none of Words.
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
	// Devices are those that reads may be served from.
	Devices []*Device
	// Limit is how many bytes chunks may take.
	Limit int64
	// Charge is told by how many bytes the memory of chunks grew; Fits reports whether the host has memory to spare.
	Charge func(n int64)
	Fits   func() bool
}

// Device is a device that reads may be served from.
type Device struct {
	Moves *mover.Device
	Key   *gpubackend.DigestKey
	// Engines says that a copy takes no processor of the host.
	Engines bool
	Lost    func() bool
	// beside is what a reader does besides waiting for the device: he compares, and copies once more.
	beside *mover.Place
}

const (
	// A copy from a device is waited for patienceTimes as long as it was thought to take, but not shorter or longer
	// than this.
	leastPatience = 20 * time.Millisecond
	mostPatience  = 250 * time.Millisecond
	patienceTimes = 8

	// What is thought of Device.beside before anything is measured.
	besideLatency   = time.Microsecond
	besideBandwidth = 10e9
)

// Cache serves the CPU reads of one mount. Its methods may be called from any goroutine.
type Cache struct {
	Options
	// Patience is the least time that a copy is waited for, Age how long a chunk that nobody reads stays at least.
	// Tests change them before they read.
	Patience, Age time.Duration

	disk *mover.Place // that homes are read from
	// trials are of small and large reads, around of those that bring a chunk.
	trials, around cost.Trials
	// fetchesMore says that there are devices from which fetchesMoreFrom.
	fetchesMore bool
	store       *chunkStore // nil where nothing is served from devices
	bytes       atomic.Int64
	memory      chunkMemory

	mu     sync.Mutex
	closed bool           // protected by mu
	calls  sync.WaitGroup // what waits for copies in the background
}

// New makes a Cache.
func New(o Options) (c *Cache, err error) {
	if len(o.Devices) == 0 {
		o.When = Off
	}
	o.Limit = max(o.Limit, ChunkSize)
	c = &Cache{Options: o, Patience: leastPatience, Age: chunkAge, disk: mover.NewDisk()}
	for _, d := range o.Devices {
		d.beside = mover.NewPlace(besideLatency, besideBandwidth)
	}
	c.fetchesMore = slices.ContainsFunc(o.Devices, c.fetchesMoreFrom)
	if o.When != Off {
		c.store, err = newChunkStore(c.Limit)
	}
	return c, err
}

// Disk is what is known of reads of home.
func (c *Cache) Disk() *mover.Place { return c.disk }

// Bytes returns how many bytes chunks take.
func (c *Cache) Bytes() int64 { return c.bytes.Load() }

// LongestPatience is how long a copy from a device is waited for at most.
func (c *Cache) LongestPatience() time.Duration { return c.patience(mostPatience) }

// patience is how long a copy is waited for that was thought to take so long.
func (c *Cache) patience(thought time.Duration) time.Duration {
	return max(min(patienceTimes*thought, mostPatience), c.Patience)
}

// inBackground calls do in a goroutine that Wait waits for. It reports false after Stop.
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

// Stop has nothing begin in the background any more.
func (c *Cache) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// Wait waits for what goes on in the background, which are copies from devices and reads of home.
func (c *Cache) Wait() { c.calls.Wait() }

// Close gives the memory of chunks back. Reads that come later are served, and nothing is kept.
func (c *Cache) Close() {
	c.store.close()
	c.memory.free()
}
