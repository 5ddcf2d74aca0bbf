package pagecache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// fileViews are the views that have bytes of one file.
type fileViews struct {
	n     atomic.Int32 // len(parts), for readers without mu
	mu    sync.Mutex
	parts []*viewPart // protected by mu
	// expected is how many views are about to read home, late how many of them are not waited for any more. gathered is
	// closed when all others have come; nil if nobody waits. vain is how long views have waited for these in vain.
	expected, late int           // protected by mu
	gathered       chan struct{} // protected by mu
	vain           time.Duration // protected by mu
	// turn counts how often pages were read for a view. Protected by File.mu.
	turn uint64
}

// any reports whether there are views.
func (s *fileViews) any() bool { return s.n.Load() > 0 }

// add marks pages of p as stale from now on when home changes.
func (s *fileViews) add(p *viewPart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts = append(s.parts, p)
	s.n.Store(int32(len(s.parts)))
}

func (s *fileViews) remove(p *viewPart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.parts, p); i >= 0 {
		s.parts = slices.Delete(s.parts, i, i+1)
	}
	s.n.Store(int32(len(s.parts)))
}

// spoil marks rg as stale in the views. The caller holds File.mu, for reading at least.
func (s *fileViews) spoil(rg page.Range) {
	if s.n.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.parts {
		p.state.Mark(rg)
	}
}

// snapshot returns the views.
func (s *fileViews) snapshot() []*View {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*View, len(s.parts))
	for i, p := range s.parts {
		list[i] = p.v
	}
	return list
}

// drop drops the unused views of the file.
func (s *fileViews) drop() {
	for _, v := range s.snapshot() {
		v.drop()
	}
}

// dropEmpty drops the unused views that have no memory.
func (s *fileViews) dropEmpty() {
	for _, v := range s.snapshot() {
		if v.empty() {
			v.drop()
		}
	}
}

// expect notes that n more views are about to read home, or with -n that n of them no longer have to be waited
// for.
func (s *fileViews) expect(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expected += n
	s.late = min(s.late, s.expected)
	s.endGatheringLocked()
}

// endGatheringLocked ends the waits of gather if nobody has to be waited for. mu is held.
func (s *fileViews) endGatheringLocked() {
	if s.expected > s.late {
		return
	}
	s.vain = 0
	if s.gathered != nil {
		close(s.gathered)
		s.gathered = nil
	}
}

// gather waits until no view is about to read home, at most for limit. A view may be held up for long, by a full
// device for example. So views that did not come in mostVain are not waited for any more.
func (s *fileViews) gather(ctx context.Context, limit time.Duration) {
	s.mu.Lock()
	if s.expected == s.late || limit < leastGather {
		s.mu.Unlock()
		return
	}
	if s.gathered == nil {
		s.gathered = make(chan struct{})
	}
	gathered := s.gathered
	s.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-gathered:
	case <-timer.C:
		s.waitedInVain(gathered, limit)
	case <-ctx.Done():
	}
}

// waitedInVain notes that a call of gather waited for limit.
func (s *fileViews) waitedInVain(gathered chan struct{}, limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gathered != gathered { // nobody has to be waited for after all
		return
	}
	if s.vain += limit; s.vain >= mostVain {
		s.late = s.expected
		s.endGatheringLocked()
	}
}

const (
	// leastGather is the shortest time that a view waits for others: less is not worth a timer.
	leastGather = 50 * time.Microsecond
	// mostVain is how long views wait for others that do not come, all waits together.
	mostVain = 200 * time.Millisecond
)

// gatherTime is how long a view that reads so many bytes waits for others that are about to read the same file: about a
// quarter of the read's time on a fast bus. They have to read again what this view reads before they come. It does not
// wait longer, because they may be waiting for memory.
func gatherTime(size int64) time.Duration {
	const most, perSecond = 50 * time.Millisecond, 2e11
	return min(time.Duration(float64(size)/perSecond*float64(time.Second)), most)
}
