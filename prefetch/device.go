package prefetch

import "github.com/gaiafs/gaiafs/internal/page"

const (
	// firstTrust is the most pages that streams may have fetched before any of them was used: 1 MiB. One page is added
	// for every trustShare used pages.
	firstTrust = 1 << 20 >> page.Shift
	trustShare = 8
)

// Device predicts for a mapping of a device. One program may read it in order, or hundreds of thread blocks in no
// order. Streams finds a few streams, also backward and with gaps; Coverage finds what many blocks do together. Streams
// is faster to see what few programs do. But with many blocks, it keeps mistaking the end of a record for the middle of
// a stream. So it gets credit, which grows with use. Strides hardly ever occur by chance, so they need no credit. If
// the program says that it reads in order, Streams alone opens windows, from the first access on.
//
// It remembers what was asked for and not yet used, so that nothing is asked for twice. So Unused may also name pages
// that were used.
type Device struct {
	streams  *Streams
	coverage *Coverage
	ahead    set // asked for and not accessed since
	// credited has the pages of ahead that were asked for on credit, and owed counts them. used counts credited pages
	// that were accessed.
	credited   set
	owed, used int64
}

// NewDevice makes a Device.
func NewDevice() *Device {
	return &Device{streams: NewStreams(DeviceStreams), coverage: NewCoverage(DefaultCoverage), ahead: make(set),
		credited: make(set)}
}

// Access implements Predictor.
func (d *Device) Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range {
	d.used += d.drop(rg)
	streams := d.streams.Access(rg, p, nil)
	if p == Sequential {
		return d.ask(rg, streams, false, ahead)
	}
	// A large access says everything about itself with its end.
	last := rg
	last.Start = max(last.Start, last.End-MaxWindow)
	ahead = d.ask(rg, d.coverage.Access(last, p, nil), false, ahead)
	return d.ask(rg, streams, d.streams.way != strided, ahead)
}

// ask appends those pages of asked that are not accessed now and were not asked for. With credit, it stops when there
// is none left.
func (d *Device) ask(now page.Range, asked []page.Range, credit bool, ahead []page.Range) []page.Range {
	for _, a := range asked {
		for i := a.Start; i < a.End; i++ {
			if d.ahead.has(i) || now.Contains(i) {
				continue
			}
			one := page.Range{Start: i, End: i + 1}
			if credit {
				if d.owed >= firstTrust+d.used/trustShare {
					return ahead
				}
				d.owed++
				d.credited.add(one)
			}
			d.ahead.add(one)
			ahead = add(ahead, one, endless)
		}
	}
	return ahead
}

// drop removes pages from those asked for. It returns how many of them were on credit.
func (d *Device) drop(rg page.Range) (credited int64) {
	for _, run := range d.credited.in(rg) {
		credited += run.Len()
	}
	d.owed -= credited
	d.credited.drop(rg)
	d.ahead.drop(rg)
	return credited
}

// Unused implements Predictor. A page fetched in vain on credit costs as much credit as trustShare used pages earn.
func (d *Device) Unused(rg page.Range) {
	for _, unread := range d.ahead.in(rg) {
		d.streams.Unused(unread)
		d.coverage.Unused(unread)
	}
	d.used = max(0, d.used-trustShare*d.drop(rg))
}

// Resize implements Predictor.
func (d *Device) Resize(end page.Index) {
	d.streams.Resize(end)
	d.coverage.Resize(end)
	for _, run := range d.credited.in(page.Range{Start: end, End: endless}) {
		d.owed -= run.Len()
	}
	d.credited.resize(end)
	d.ahead.resize(end)
}
