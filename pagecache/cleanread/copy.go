package cleanread

import (
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// deviceCopy is a copy of pages from a device for the host. It holds the extents, so that nobody else gets their memory
// before it has ended, however long that takes, and whatever has become of the File.
type deviceCopy struct {
	*mover.Read
	device *Device
	pages  page.Range // of the file
	// epoch is that of pages when it was known that they are home's.
	epoch uint64
	// compare are those of pages that programs may have stored into, with the digests of home's.
	compare []comparison
	// thought is how long an urgent one was thought to take.
	thought time.Duration
}

type comparison struct {
	pages  page.Range
	agreed []gpubackend.Digest
}

// plan makes a copy of pages that h has, of those that facts are about. It returns nil where the facts do not hold any
// more.
func (f *File) plan(facts *Facts, h *Have, pages page.Range) *deviceCopy {
	var parts []mover.Part
	var held []Extent
	letGo := func() {
		for _, x := range held {
			x.LetGo()
		}
	}
	there := page.Index(0)
	for _, x := range h.Extents {
		part := pages.Intersect(x.Pages())
		if part.Empty() || !x.TryHold() {
			continue
		}
		held = append(held, x)
		there += page.Index(part.Len())
		parts = append(parts, mover.Part{
			Mem: x.Memory(), Off: (part.Start - x.Pages().Start).Offset(), N: part.Bytes(),
		})
	}
	p := &deviceCopy{device: h.Device, pages: pages, epoch: f.epoch(pages)}
	// The extents are held first: whoever takes memory away, or changes what is in it, advances the epoch before he
	// looks who holds it.
	if int64(there) != pages.Len() || f.epoch(facts.pages) != facts.epoch {
		letGo()
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
	p.Read = h.Device.Moves.NewRead(parts, letGo)
	return p
}

// beUrgent says that whoever asks for p waits for it. Where the device has no engines he copies himself: his processor
// copies as well as another one would.
func (p *deviceCopy) beUrgent(thought time.Duration) {
	p.thought = thought
	p.Urgent(!p.device.Engines)
}

// wait waits for p, an urgent copy, but not for long; if it returns false, somebody else cleans up after p. Otherwise
// the caller calls Finish.
func (c *Cache) wait(p *deviceCopy) (done bool) { return p.Wait(c.patience(p.thought)) }

// verify returns the pages of p, copied, that are not known to be what home has.
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

// isHome reports whether a copy that has ended is known to be what home has.
func (f *File) isHome(p *deviceCopy) bool { return p.Err() == nil && f.verify(p).Empty() }
