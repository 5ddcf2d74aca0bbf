package pagecache

import (
	"context"
	"errors"
	"syscall"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
)

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

// Advise gives a hint. AdviceSequential and AdviceRandom say how a lazy mapping will be acquired, AdviceNormal leaves
// that to be found out; they hold for the whole mapping. AdviceWillNeed starts to bring the range up to date and returns
// before it is. AdviceDontNeed releases the range, brings it home, and gives back what no other mapping needs: the next
// Acquire fetches it again. EINVAL outside the mapping or for an unknown advice.
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
		return m.fetch(rg)
	case AdviceDontNeed:
		return m.dontNeed(ctx, off, n, rg)
	}
	return fail(syscall.EINVAL, "there is no advice %d", a)
}

// fetch brings rg up to date in the background, as far as the file goes and for as long as the mapping lives.
func (m *Mapping) fetch(rg page.Range) error {
	if err := m.enter(); err != nil {
		return err
	}
	go func() {
		defer m.calls.Done()
		pages, err := m.f.acquireAhead(m.life, m.h, rg)
		if err != nil && !errors.Is(err, context.Canceled) {
			m.f.c.log.Warn("fetching ahead", "file", m.f.Name(), "device", m.dev.info.Ordinal, "error", err)
		}
		m.f.count(func(c *Counters) { c.PrefetchedPages.Add(pages) })
	}()
	return nil
}

// acquireAhead is acquire of what lies before end of file, wherever that is when the pages have their turn: a window may reach
// beyond it, and the file be truncated while the window is fetched.
func (f *File) acquireAhead(ctx context.Context, h *holding, rg page.Range) (pages int64, err error) {
	for rest := rg; err == nil; {
		f.mu.Lock()
		if rest = rest.Intersect(f.fileRangeLocked()); rest.Empty() {
			f.mu.Unlock()
			break
		}
		if err = ctx.Err(); err == nil {
			var n int64
			n, rest.Start, err = f.acquireLocked(ctx, h, rest, holdTime)
			pages += n
		}
		f.mu.Unlock()
	}
	return pages, err
}

// pattern is what the program said of its accesses.
func (m *Mapping) pattern() prefetch.Pattern {
	switch Advice(m.advice.Load()) {
	case AdviceSequential:
		return prefetch.Sequential
	case AdviceRandom:
		return prefetch.Random
	}
	return prefetch.Unknown
}

// predict fetches what the mapping's next acquires are expected to ask for.
func (m *Mapping) predict(rg page.Range) {
	m.readAheadMu.Lock()
	ahead := m.readAhead.Access(rg, m.pattern(), nil)
	m.readAheadMu.Unlock()
	for _, a := range ahead {
		if a = a.Intersect(m.pages); !a.Empty() {
			_ = m.fetch(a) // the mapping ended: nobody needs it
		}
	}
}

func (m *Mapping) dontNeed(ctx context.Context, off, n int64, rg page.Range) error {
	if _, err := m.Release(ctx, off, n); err != nil {
		return err
	}
	if err := m.enter(); err != nil {
		return err
	}
	defer m.calls.Done()
	f := m.f
	f.mu.Lock()
	defer f.mu.Unlock()
	rest := []page.Range{rg}
	for other := range f.mappings {
		if other != m && other.h == m.h {
			rest = page.Subtract(rest, other.pages)
		}
	}
	for _, r := range rest {
		// A page that the kernel is being made to forget stays.
		if len(f.lrc.Draining(r)) > 0 {
			continue
		}
		if err := f.collectLocked(ctx, r, false); err != nil {
			return err
		}
		// Only what home has is dropped: pages stored into since the release stay.
		if m.writable {
			modified, err := f.modifiedLocked(ctx, m.h, r)
			if err != nil {
				f.lostLocked(m.dev, err)
				return m.dev.fault(err)
			}
			keep := []page.Range{r}
			for _, x := range modified {
				keep = page.Subtract(keep, x)
			}
			for _, k := range keep {
				f.dropBasesLocked(f.lrc.Evicted(k, m.dev.owner))
			}
			continue
		}
		f.dropBasesLocked(f.lrc.Evicted(r, m.dev.owner))
	}
	return nil
}
