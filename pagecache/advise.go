package pagecache

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/prefetch"
)

// aheadHold is the holdTime of read-ahead. It is short because requests that wait for their pages come first.
const aheadHold = time.Millisecond

// Advice is a hint about future use of a range.
type Advice uint8

// The advice of gaia_madvise, with the meaning of the posix_madvise constants of the same names.
const (
	AdviceNormal Advice = iota
	AdviceSequential
	AdviceRandom
	AdviceWillNeed
	AdviceDontNeed
)

// Advise gives a hint. AdviceSequential and AdviceRandom say how a lazy mapping will be acquired; AdviceNormal leaves
// that to detection. These three apply to the whole mapping. AdviceWillNeed starts to bring the range up to date, and
// does not wait for it. AdviceDontNeed releases the range, brings it home, and frees pages that no other mapping needs;
// the next Acquire fetches them again. It returns EINVAL if the range is outside the mapping or the advice is unknown.
func (m *Mapping) Advise(ctx context.Context, off, n int64, a Advice) error {
	rg, err := m.at(off, n)
	if err != nil {
		return err
	}
	switch a {
	case AdviceNormal, AdviceSequential, AdviceRandom:
		m.advice.Store(uint32(a))
		return nil
	case AdviceWillNeed:
		if m.client != nil {
			return nil // movable mappings get memory only in brackets
		}
		return m.fetch(rg)
	case AdviceDontNeed:
		if m.client != nil { // memory of movable mappings is taken as soon as others need it
			_, err := m.Release(ctx, off, n)
			return err
		}
		return m.dontNeed(ctx, off, n, rg)
	}
	return fail(syscall.EINVAL, "there is no advice %d", a)
}

// fetch brings rg up to date in the background. It stops at end of file and when the mapping ends.
func (m *Mapping) fetch(rg page.Range) error {
	if err := m.enter(m.dev); err != nil {
		return err
	}
	go func() {
		defer m.calls.Done()
		if leave, err := m.f.enterReads(m.life, m.h); err == nil {
			defer leave()
			m.acquireAhead(rg)
		}
	}()
	return nil
}

// acquireAhead acquires the part of rg before end of file. It checks the size again in each step, since a window may
// reach past the end and the file may be truncated meanwhile. It continues with queued ranges that adjoin rg. While
// somebody waits for the file, its transfers are as urgent as those of an acquire.
func (m *Mapping) acquireAhead(rg page.Range) {
	f, pages := m.f, int64(0)
	ctx := mover.Ahead(mover.WithTenant(m.life, m.user), f.mu.Awaited)
	var err error
	for rest := rg; err == nil; {
		m.readAheadMu.Lock()
		for len(m.queue) > 0 && m.queue[0].Start == rest.End {
			rest.End, m.queue = m.queue[0].End, m.queue[1:]
		}
		m.readAheadMu.Unlock()
		if err = f.mu.LockLaterIn(ctx); err != nil {
			break
		}
		if rest = rest.Intersect(f.fileRangeLocked()); rest.Empty() {
			f.mu.Unlock()
			break
		}
		if err = ctx.Err(); err == nil {
			var n int64
			n, rest.Start, err = f.acquireLocked(ctx, m.h, rest, aheadHold)
			pages += n
		}
		pause := m.h.reads.Pause()
		f.mu.Unlock()
		pause(ctx)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		f.c.log.Warn("fetching ahead", "file", f.Name(), "device", m.dev.info.Ordinal, "error", err)
	}
	f.count(func(c *Counters) { c.PrefetchedPages.Add(pages) })
}

// pattern returns the access pattern that the program announced.
func (m *Mapping) pattern() prefetch.Pattern {
	switch Advice(m.advice.Load()) {
	case AdviceSequential:
		return prefetch.Sequential
	case AdviceRandom:
		return prefetch.Random
	}
	return prefetch.Unknown
}

// predict queues what the mapping's next acquires are expected to ask for.
func (m *Mapping) predict(rg page.Range) {
	m.readAheadMu.Lock()
	defer m.readAheadMu.Unlock()
	for _, a := range m.readAhead.Access(rg, m.pattern(), nil) {
		if a = a.Intersect(m.pages); !a.Empty() {
			m.queue = append(m.queue, a)
		}
	}
	if len(m.queue) == 0 || m.fetching || m.enter(m.dev) != nil {
		return
	}
	m.fetching = true
	go m.fetchQueue()
}

// fetchQueue fetches the queued ranges until none are left. There is one goroutine per mapping: acquires wait for its
// transfers under way, and hundreds of thread blocks may be acquiring.
func (m *Mapping) fetchQueue() {
	defer m.calls.Done()
	leave, err := m.f.enterReads(m.life, m.h)
	if err == nil {
		defer leave()
	}
	for {
		m.readAheadMu.Lock()
		if len(m.queue) == 0 || m.life.Err() != nil {
			m.queue, m.fetching = nil, false
			m.readAheadMu.Unlock()
			return
		}
		rg := m.queue[0]
		m.queue = m.queue[1:]
		m.readAheadMu.Unlock()
		m.acquireAhead(rg)
	}
}

// unused tells the read-ahead that the pages of rg were given up.
func (m *Mapping) unused(rg page.Range) {
	if m.readAhead == nil {
		return
	}
	m.readAheadMu.Lock()
	defer m.readAheadMu.Unlock()
	m.readAhead.Unused(rg)
}

func (m *Mapping) dontNeed(ctx context.Context, off, n int64, rg page.Range) error {
	if _, err := m.Release(ctx, off, n); err != nil {
		return err
	}
	if err := m.enter(m.dev); err != nil {
		return err
	}
	defer m.calls.Done()
	m.unused(rg)
	f := m.f
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer f.mu.Unlock()
	rest := []page.Range{rg}
	for other := range f.mappings {
		if other != m && other.h == m.h {
			rest = page.Subtract(rest, other.pages)
		}
	}
	for _, r := range rest {
		// Pages that the kernel is still dropping stay.
		if len(f.lrc.Draining(r)) > 0 {
			continue
		}
		if err := f.collectLocked(ctx, r, false); err != nil {
			return err
		}
		// Drop only what home has: pages stored into since the release stay.
		drop := []page.Range{r}
		if m.writable {
			stored, err := m.h.storedLocked(ctx, r)
			if err != nil {
				return err
			}
			drop = subtract(drop, stored)
		}
		for _, d := range drop {
			if err := m.h.giveUpLocked(ctx, d); err != nil {
				return err
			}
			if m.writable {
				m.h.hollowLocked(d)
			}
		}
	}
	return nil
}
