package cleanread

import (
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// deviceCopy is a copy of pages from a device to the host. It holds the extents, so their memory is not reused until
// the copy has ended, however long that takes, and even if the File is gone.
type deviceCopy struct {
	*mover.Read
	device *Device
	pages  page.Range // pages of the file
	// epoch is the epoch of pages at which they were known to match home.
	epoch uint64
	// compare lists the pages that programs may have stored into, with the digests of home's bytes.
	compare []comparison
	// thought is the expected time of an urgent copy.
	thought time.Duration
	// held are the extents; oneHeld and onePart are memory for a copy from one extent.
	held    []Extent
	oneHeld [1]Extent
	onePart [1]mover.Part
}

// letGo lets go of the extents.
func (p *deviceCopy) letGo() {
	for _, x := range p.held {
		x.LetGo()
	}
}

type comparison struct {
	pages  page.Range
	agreed []gpubackend.Digest
}

// plan makes a copy of pages that h has, which are among those of facts. It returns nil if the facts are no longer
// valid.
func (f *File) plan(facts *Facts, h *Have, pages page.Range) *deviceCopy {
	p := &deviceCopy{device: h.Device, pages: pages}
	p.held = p.oneHeld[:0]
	parts := p.onePart[:0]
	there := page.Index(0)
	for _, x := range h.Extents {
		part := pages.Intersect(x.Pages())
		if part.Empty() || !x.TryHold() {
			continue
		}
		p.held = append(p.held, x)
		there += page.Index(part.Len())
		parts = append(parts, mover.Part{
			Mem: x.Memory(), Off: (part.Start - x.Pages().Start).Offset(), N: part.Bytes(),
		})
	}
	p.epoch = f.epoch(pages)
	// The extents are held first. A goroutine that takes memory away, or changes its content, advances the epoch before
	// it checks who holds the memory.
	if int64(there) != pages.Len() || f.epoch(facts.pages) != facts.epoch {
		p.letGo()
		return nil
	}
	at := 0
	for _, t := range h.Tracked {
		if rg := t.Intersect(pages); !rg.Empty() {
			first := at + int(rg.Start-t.Start)
			p.compare = append(p.compare, comparison{pages: rg, agreed: h.Agreed[first : first+int(rg.Len())]})
		}
		at += int(t.Len())
	}
	p.Read = h.Device.Moves.NewRead(parts, p.letGo)
	return p
}

// beUrgent says that a reader waits for p. If the device has no engines, the reader copies the bytes: its processor is
// as good as another one.
func (p *deviceCopy) beUrgent(thought time.Duration) {
	p.thought = thought
	p.Urgent(!p.device.Engines)
}

// wait waits a bounded time for p, an urgent copy. If it returns false, the end of the copy cleans up. Otherwise the
// caller calls Finish.
func (c *Cache) wait(p *deviceCopy) (done bool) { return p.Wait(c.patience(p.thought)) }

// verify returns the pages of p, copied, that are not known to match home.
func (f *File) verify(p *deviceCopy) (doubtful page.Range) {
	sums := make([]gpubackend.Digest, 0, 32)
	compared := int64(0)
	for _, c := range p.compare {
		compared += c.pages.Len()
		sums = append(sums[:0], c.agreed...)
		at := (c.pages.Start - p.pages.Start).Offset()
		p.device.Key.SumPages(p.Buf()[at:at+c.pages.Bytes()], sums)
		for i := range sums {
			if sums[i] == c.agreed[i] {
				continue
			}
			bad := c.pages.Start + page.Index(i)
			if doubtful.Empty() {
				doubtful.Start = bad
			}
			doubtful.End = bad + 1
		}
	}
	if !doubtful.Empty() {
		f.setTorn(doubtful, p.epoch == f.epoch(p.pages))
	}
	if compared < p.pages.Len() && f.epoch(p.pages) != p.epoch {
		return p.pages
	}
	return doubtful
}

// isHome reports whether a copy that has ended is known to match home.
func (f *File) isHome(p *deviceCopy) bool { return p.Err() == nil && f.verify(p).Empty() }
