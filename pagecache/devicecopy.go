package pagecache

import (
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// deviceCopy is a copy of pages from a device for the host. It pins the extents, so that nobody else gets their memory before it has
// ended, however long that takes, and whatever has become of the File.
type deviceCopy struct {
	*mover.Read
	dev   *device
	pages page.Range // of the file
	// thought is how long an urgent one was thought to take.
	thought time.Duration
}

// newCopyLocked makes a deviceCopy of pages that h holds and pins them.
func (h *holding) newCopyLocked(pages page.Range) *deviceCopy {
	var parts []mover.Part
	var pinned []*extent
	h.each(pages, func(x *extent, part page.Range) {
		x.Hold()
		pinned = append(pinned, x)
		parts = append(parts, mover.Part{Mem: x.Memory(), Off: x.off(part.Start), N: part.Bytes()})
	})
	return &deviceCopy{dev: h.dev, pages: pages, Read: h.dev.moves.NewRead(parts, func() {
		for _, x := range pinned {
			x.LetGo()
		}
	})}
}

// beUrgent says that whoever asks for j waits for it. Where the device has no engines he copies himself: his processor copies as well
// as another one would.
func (j *deviceCopy) beUrgent(thought time.Duration) {
	j.thought = thought
	j.Urgent(!j.dev.info.CopyEngines)
}

// wait waits for j, an urgent copy, but not for long; if it returns false, somebody else cleans up after j. Otherwise the caller
// calls Finish.
func (c *Cache) wait(j *deviceCopy) (done bool) { return j.Wait(c.patience(j.thought)) }

// prepareDeviceReads makes what CPU reads from devices need. Chunks take up to limit bytes.
func (c *Cache) prepareDeviceReads(when DeviceReads, limit int64) (err error) {
	c.deviceReads, c.leastPatience, c.cleanAge = when, leastPatience, cleanAge
	if len(c.devices) == 0 {
		c.deviceReads = DeviceReadsOff
	}
	c.fetchesMore = slices.ContainsFunc(c.devices, c.fetchesMoreFrom)
	c.disk = mover.NewDisk()
	c.cleanLimit = max(limit, chunkSize)
	if c.deviceReads != DeviceReadsOff {
		c.clean, err = newCleanStore(c.cleanLimit)
	}
	return err
}

// closePatience is how long Close waits for devices that do not answer.
const closePatience = 5 * time.Second

// endCopies lets no more copies begin and waits for those under way.
func (c *Cache) endCopies() {
	defer c.chunks.free()
	defer c.clean.close()
	for _, d := range c.devices {
		d.moves.Close()
	}
	ended := make(chan struct{})
	go func() {
		c.waitCopies()
		close(ended)
	}()
	timer := time.NewTimer(closePatience)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		c.log.Error("a device does not answer; the mount ends without it")
	}
}

// waitCopies waits for the copies for CPU reads that are under way, and for what waits for them in the background.
func (c *Cache) waitCopies() {
	for _, d := range c.devices {
		d.moves.Wait()
	}
	c.deviceCalls.Wait()
}

// homeRead is ReadAt of home, of pages that the host's page cache lacks, measured.
func (c *Cache) homeRead(home HomeReader, p []byte, off int64) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.disk.Measure(int64(len(p)), func() error {
		n, err = home.ReadAt(p, off)
		return err
	})
	return n, err
}
