package prefetch

import "github.com/gaiafs/gaiafs/internal/page"

const (
	// firstTrust is the most pages that streams may have fetched before any of them was used: 1 MiB. Of the pages that
	// were, one in trustShare is added.
	firstTrust = 1 << 20 >> page.Shift
	trustShare = 8
)

// Device predicts for a mapping of a device, through which one program goes in order or hundreds of thread blocks in
// none: Streams finds the few streams that there may be, also backward and with gaps, Coverage what many make together.
// Streams is quicker to see what few programs do. Where there are many, it takes the end of a record for the middle of
// a stream again and again, so it has credit that grows with what was used; strides are hardly ever there by chance,
// and need none. Where the program said that it reads in order, Streams alone opens windows with the first access.
//
// It remembers what was asked for and not used yet, so that nothing is asked for twice, and that Unused can be told of
// pages that were used.
type Device struct {
	streams  *Streams
	coverage *Coverage
	ahead    set // asked for and not accessed since
	// credited are those of ahead that were asked for on credit, owed is their number, used that of those that were
	// accessed.
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
	// A large access says all about itself with its end.
	last := rg
	last.Start = max(last.Start, last.End-MaxWindow)
	ahead = d.ask(rg, d.coverage.Access(last, p, nil), false, ahead)
	return d.ask(rg, streams, d.streams.way != strided, ahead)
}

// ask appends what of asked is not accessed now and was not asked for, as far as credit goes if it takes some.
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

// drop takes pages out of those that were asked for, and returns how many of them on credit.
func (d *Device) drop(rg page.Range) (credited int64) {
	for _, run := range d.credited.in(rg) {
		credited += run.Len()
	}
	d.owed -= credited
	d.credited.drop(rg)
	d.ahead.drop(rg)
	return credited
}

// Unused implements Predictor. What was fetched in vain costs as much credit as so much use earned.
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
