package pagecache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Released bytes wait until home has them. While home cannot take them they stay on their device. They are tried again,
// soon at first and then every longestRetry, so they come home shortly after there is room.
const (
	firstRetry   = 100 * time.Millisecond
	longestRetry = time.Second
)

// Waiting describes released bytes of a file that home does not have.
type Waiting struct {
	// File is the path below the mountpoint when the file was last mapped.
	File  string `json:"file"`
	Bytes int64  `json:"bytes"`
	// Error says why the last attempt to bring them home failed; empty if none has failed.
	Error string `json:"error,omitempty"`
}

func (w Waiting) String() string {
	text := fmt.Sprintf("%d bytes of %s", w.Bytes, Printable(w.File))
	if w.Error != "" {
		text += ": " + w.Error
	}
	return text
}

// Waiting lists the files with released bytes that are not home, by name. It does not wait for files that hang.
func (c *Cache) Waiting() []Waiting {
	var all []Waiting
	for _, v := range c.glances() {
		if v.WaitingBytes > 0 {
			all = append(all, Waiting{File: v.Name, Bytes: v.WaitingBytes, Error: v.Error})
		}
	}
	slices.SortFunc(all, func(a, b Waiting) int { return cmp.Compare(a.File, b.File) })
	return all
}

// backlog is what is known of released bytes that home lacks. File.mu protects it.
type backlog struct {
	since time.Time // of the oldest release that was not collected, or zero
	// coming is the number of pages released since home last had everything. Read without File.mu, too.
	coming atomic.Int64
	// err is the error of the last failed attempt to bring bytes home. It is nil again once none of those bytes wait.
	err     error
	failing atomic.Bool // err is set, for readers without File.mu
}

// failed notes an error, and reports whether it is the first in a row.
func (b *backlog) failed(err error) (first bool) {
	first = b.err == nil
	b.err = err
	b.failing.Store(true)
	return first
}

// recovered ends the errors, and reports whether there were any.
func (b *backlog) recovered() (did bool) {
	did = b.err != nil
	b.err = nil
	b.failing.Store(false)
	return did
}

// end notes that home lacks nothing, and reports whether it did before.
func (b *backlog) end() (did bool) {
	b.recovered()
	b.coming.Store(0)
	did = !b.since.IsZero()
	b.since = time.Time{}
	return did
}

// waitsLocked reports whether home lacks released bytes.
func (f *File) waitsLocked() bool {
	return f.flights.any() || len(f.lrc.Pending(page.Range{End: f.lrc.End()}, true)) > 0
}

// waitingBytesLocked counts the released bytes of the file that home lacks.
func (f *File) waitingBytesLocked() int64 {
	if f.backlog.since.IsZero() {
		return 0
	}
	var bytes int64
	for _, p := range f.lrc.Pending(page.Range{End: f.lrc.End()}, true) {
		bytes += p.Range.Span().Intersect(page.Bytes{End: f.home.Size()}).Len()
	}
	for _, x := range f.flights.in(page.From(0).Pages(), math.MaxInt64) {
		bytes += x.pages.Bytes() // counted even if a later collect will replace them
	}
	return bytes
}

// Flush brings all released bytes home that can be brought there. It waits for releases that are under way, but not for
// files that are stuck. Its error says what went wrong; Waiting lists what is left.
//
// A release that does not end holds up the pages that it drains, and no others: no lane waits for a release.
func (c *Cache) Flush(ctx context.Context) error {
	select {
	case c.flushing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-c.flushing }()
	files := c.snapshotFiles()
	draining := make(chan drainingFile, len(files))
	errs := c.flushFiles(ctx, files, func(f *File) error {
		drains, err := f.flush(ctx)
		if len(drains) == 0 {
			return err
		}
		draining <- drainingFile{f, drains, err}
		return nil
	})
	ends := make(chan error, len(files))
	n := len(draining) // a late file may send one more, and is reported already
	for range n {
		d := <-draining
		go func() { ends <- c.flushDraining(ctx, d) }()
	}
	for range n {
		errs = append(errs, <-ends)
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// drainingFile is a file with releases under way. Everything but their pages was flushed; err is the result.
type drainingFile struct {
	f      *File
	drains []<-chan struct{}
	err    error
}

// flushFiles calls flush for files in their lanes. It does not wait for files that are stuck.
func (c *Cache) flushFiles(ctx context.Context, files []*File, flush func(f *File) error) []error {
	errs, late := c.onFiles(ctx, files, choreFlush, false, func(f *File) error { return ofFile(f, flush(f)) })
	c.lanes.withdrawFlushes(late)
	for _, f := range late {
		errs = append(errs, ofFile(f, f.notAnswered()))
	}
	return errs
}

func ofFile(f *File, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", f.Name(), err)
}

// flushDraining flushes the rest of a file after its releases have ended.
func (c *Cache) flushDraining(ctx context.Context, d drainingFile) error {
	tick := time.NewTicker(c.stuckAfter)
	defer tick.Stop()
	for _, ended := range d.drains {
		for waits := true; waits; {
			select {
			case <-ended:
				waits = false
			case <-tick.C:
				if !c.lanes.blocked(d.f) {
					continue
				}
				return errors.Join(ofFile(d.f, d.err), ofFile(d.f, d.f.notAnswered()))
			case <-ctx.Done():
				return errors.Join(ofFile(d.f, d.err), ofFile(d.f,
					fail(syscall.ETIMEDOUT, "a release of the file has not ended")))
			}
		}
	}
	return errors.Join(c.flushFiles(ctx, []*File{d.f}, func(f *File) error { return f.collectWhatCan(ctx) })...)
}

// flush brings the released bytes of the file home, except pages of releases under way. It returns those releases.
func (f *File) flush(ctx context.Context) (drains []<-chan struct{}, err error) {
	f.mu.Lock()
	waits := !f.backlog.since.IsZero()
	if waits {
		drains = f.kernel.Ends(page.Range{End: f.lrc.End()})
	}
	f.mu.Unlock()
	if !waits {
		return nil, nil
	}
	return drains, f.collectWhatCan(ctx)
}

// mostPassed is the most runs that home refuses and that are skipped one by one. After that, the rest of each portion
// with such a run waits too.
const mostPassed = 64

// collectWhatCan brings all released bytes home that home takes, and skips the others. It returns the first error.
func (f *File) collectWhatCan(ctx context.Context) error {
	first := f.collectAll(ctx, nil)
	if first == nil {
		return nil
	}
	f.mu.Lock()
	passed := 0
	for _, x := range f.flights.in(page.From(0).Pages(), math.MaxInt64) {
		if passed == mostPassed {
			break
		}
		if f.landLocked(x.pages) != nil {
			passed++
		}
	}
	portions := portionsOf(f.lrc.Pending(page.Range{End: f.lrc.End()}, false), collectPortion)
	f.mu.Unlock()
	passed = 0
	for _, c := range portions {
		part := page.Range{Start: c[0].Range.Start, End: c[len(c)-1].Range.End}
		for !part.Empty() {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f.mu.Lock()
			err := f.collectLocked(ctx, part, false)
			left := f.lrc.Pending(part, false)
			f.mu.Unlock()
			if err == nil || passed == mostPassed || len(left) == 0 {
				break
			}
			passed++
			part.Start = left[0].Range.End
		}
	}
	return first
}

// nothingWaitsLocked notes that home has all released bytes, or that nobody misses them.
func (f *File) nothingWaitsLocked() {
	if f.backlog.end() {
		f.c.hold.drop()
	}
}

// failedLocked notes that bytes could not be brought home. It logs the first failure in a row.
func (f *File) failedLocked(err error) {
	if f.backlog.failed(err) {
		f.c.log.Error("released bytes cannot be written back; they are kept and tried again", "file", f.Name(),
			"bytes", f.waitingBytesLocked(), "error", err)
	}
	f.count(func(c *Counters) { c.WriteBackFailures.Add(1) })
	select {
	case f.c.failed <- struct{}{}:
	default:
	}
}

// recoveredLocked notes that the failure is over.
func (f *File) recoveredLocked() {
	if f.backlog.recovered() {
		f.c.log.Info("released bytes are written back again", "file", f.Name())
	}
}

// retry collects the files that failed, and reports whether there are any.
func (c *Cache) retry(ctx context.Context) (again bool) {
	for _, f := range c.snapshotFiles() {
		if f.backlog.failing.Load() && !f.detached.Load() {
			again = true
			c.lanes.do(f, choreCollect, func() { _ = f.collectAll(ctx, nil) }) // collectAll noted the error
		}
	}
	return again
}

// holdPatience is how long a release waits for the hold to begin. The path to the mountpoint may lead over a filesystem
// that hangs, and releases must go on all the same.
const holdPatience = time.Second

// pendingHold holds the mount busy while released bytes wait. Its users are the Files with waiting bytes, and the
// releases under way.
type pendingHold struct {
	begin func() (held <-chan struct{}, end func()) // immutable; nil without Options.Hold

	mu    sync.Mutex
	users int             // protected by mu
	held  <-chan struct{} // protected by mu; set while there are users, as is end
	end   func()          // protected by mu
}

// take adds a user and waits until the hold has begun. The caller holds no lock.
func (h *pendingHold) take() {
	held := h.join()
	if held == nil {
		return
	}
	select {
	case <-held:
		return
	default: // rare: the common case needs no timer
	}
	select {
	case <-held:
	case <-time.After(holdPatience):
	}
}

// join adds a user and does not wait. held is closed when the hold has begun; it is nil without Options.Hold.
func (h *pendingHold) join() (held <-chan struct{}) {
	if h.begin == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users++; h.users == 1 {
		h.held, h.end = h.begin()
	}
	return h.held
}

// drop removes a user that take or join added.
func (h *pendingHold) drop() {
	if h.begin == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users--; h.users == 0 {
		h.end()
	}
}
