package cleanread

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Serve serves a read of len(p) bytes at off, in a file of size bytes. Nothing of the pages is pending. direct says
// that the bytes will not enter the kernel's page cache. Serve blocks on home, on devices for at most LongestPatience
// each, and on the executor's lock; ctx bounds that wait.
func (f *File) Serve(ctx context.Context, p []byte, off, size int64, home Home, direct bool) (n int, err error) {
	c := f.c
	if !direct && c.fetchesMore {
		// This comes before the read itself: the next reads may be under way already, and should find that their pages
		// are being fetched.
		f.readAhead(ctx, f.expect(page.Covering(off, int64(len(p))), size), home)
	}
	n, late := f.readClean(p, off, direct)
	if n == len(p) {
		return n, nil
	}
	rest, at := p[n:], off+int64(n)
	if c.When != Always && !late {
		if m, err := home.ReadCached(rest, at); err == nil && m == len(rest) {
			f.ex.Count(func(c *Counters) { c.HostReads.Add(1); c.HostReadBytes.Add(int64(m)) })
			return n + m, nil
		}
	}
	m, atHome := 0, late
	if !late {
		m, atHome = f.readAround(ctx, rest, at, size, direct)
	}
	switch {
	case m > 0:
	case atHome:
		m, err = f.fromHome(home, rest, at)
	default:
		m, err = f.readDeviceOrHome(ctx, rest, at, home)
	}
	return n + m, err
}

// readDeviceOrHome reads from a device, from home, or from both at once.
func (f *File) readDeviceOrHome(ctx context.Context, p []byte, off int64, home Home) (n int, err error) {
	c, want, began := f.c, int64(len(p)), time.Now()
	defer func() { c.trials.Spent(want, time.Since(began)) }()
	facts := f.facts(ctx, page.Covering(off, want))
	if err := ctx.Err(); err != nil && facts == nil {
		return 0, err
	}
	plan := f.choose(facts, off, want, began)
	if plan == nil || !plan.Start() {
		return f.fromHome(home, p, off)
	}
	// The device gives the beginning, the end, or everything.
	lo := max(plan.pages.Offset(), off) - off
	hi := min(plan.pages.End.Offset(), off+want) - off
	// Home's part comes first: it is at most one of these two.
	before, err := f.fromHome(home, p[:lo], off)
	after := 0
	if err == nil && hi < want {
		after, err = f.fromHome(home, p[hi:], off+hi)
	}
	if !c.wait(plan) {
		f.ex.Count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
		if err != nil || int64(before) < lo {
			return before, err
		}
		n, err = f.fromHome(home, p[lo:hi], off+lo)
		if err != nil || int64(n) < hi-lo { // the file has become shorter
			return before + n, err
		}
		return before + n + after, nil
	}
	defer plan.Finish()
	if err != nil || int64(before) < lo {
		return before, err
	}
	end, err := f.take(plan, home, p, off, lo, hi)
	if err != nil || end < hi { // the file has become shorter
		return int(end), err
	}
	return int(hi) + after, nil
}

// take fills bytes [lo, hi) of p, which begins at off, from the copy of plan. Bytes whose digests do not match come
// from home. end is the end of the filled part of p.
func (f *File) take(plan *deviceCopy, home Home, p []byte, off, lo, hi int64) (end int64, err error) {
	waited := time.Now()
	doubtful := plan.pages
	if plan.Err() == nil {
		doubtful = f.verify(plan)
	}
	from := off + lo - plan.pages.Offset()
	copied := 0
	if plan.Err() == nil {
		copied = copy(p[lo:hi], plan.Buf()[from:])
	}
	plan.device.overhead.Note(hi-lo, waited, time.Now())
	if !doubtful.Empty() {
		f.ex.Count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
		a, b := max(doubtful.Offset()-off, lo), min(doubtful.End.Offset()-off, hi)
		m, err := f.fromHome(home, p[a:b], off+a)
		copied -= m
		if err != nil || int64(m) < b-a { // the file has become shorter
			return a + int64(m), err
		}
	}
	if copied > 0 {
		f.ex.Count(func(c *Counters) { c.DeviceReads.Add(1); c.DeviceReadBytes.Add(int64(copied)) })
	}
	return hi, nil
}

// fromHome reads from home, and counts and measures the read.
func (f *File) fromHome(home Home, p []byte, off int64) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err = f.c.homeRead(home.ReadAt, p, off, false)
	f.ex.Count(func(c *Counters) { c.DiskReads.Add(1); c.DiskReadBytes.Add(int64(n)) })
	return n, err
}

// homeRead reads home when the host's page cache lacks part of the bytes, and measures the time. apart says that no
// reader waits for it.
func (c *Cache) homeRead(
	readAt func(p []byte, off int64) (int, error), p []byte, off int64, apart bool,
) (n int, err error) {
	c.disk.Measure(int64(len(p)), apart, func() error {
		n, err = readAt(p, off)
		return err
	})
	return n, err
}
