package residency

import (
	"context"
	"errors"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// stock keeps the memory of a grant's victims for the grant. Freeing memory, allocating new memory, and exporting and
// zeroing that takes longer than copying the new contents in. A stock lives for one attempt at a grant. The memory that
// is left at its end is freed.
type stock struct {
	dev   *Device
	by    Tenant
	wants []Want
	stay  delayed

	size  int64               // of each memory that is kept; protected by Device.mu
	lacks int                 // how many memories may be kept; protected by Device.mu
	mems  []gpubackend.Memory // protected by Device.mu
}

// passesTo reports whether a user may be given memory that the users in had were given. That is so if nobody has it any
// more, or only that user. If exports can be read-only, only the first counts: the user may still have the memory for
// writing, and may be allowed only to read the new contents. Memory that a client abandoned is passed on only when
// nobody has it.
func (d *Device) passesTo(user uint32, mem gpubackend.Memory, had []uint32) bool {
	others := slices.ContainsFunc(had, func(u uint32) bool { return u != user })
	return !others && !d.info.ReadOnlyExports || !mem.Held()
}

// keep takes an extent's former memory into the stock, if it is suitable. had are the users that may have been given
// it.
func (s *stock) keep(mem gpubackend.Memory, had []uint32) bool {
	d := s.dev
	if !d.passesTo(s.by.User, mem, had) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stock != s || mem.Size() != s.size || len(s.mems) == s.lacks {
		return false
	}
	s.mems = append(s.mems, mem)
	return true
}

// take is Device.alloc from the stock. nil if the stock has no memory of that size.
func (s *stock) take(size int64) gpubackend.Memory {
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	last := len(s.mems) - 1
	if last < 0 || s.size != size {
		return nil
	}
	mem := s.mems[last]
	s.mems = s.mems[:last]
	d.making++
	d.taken += size
	return mem
}

// drop frees the rest of the stock.
func (s *stock) drop() {
	d := s.dev
	d.mu.Lock()
	rest := s.mems
	s.mems = nil
	d.mu.Unlock()
	for _, mem := range rest {
		d.freeOwn(mem)
	}
	if len(rest) > 0 {
		d.wake()
	}
}

// open makes the stock collect memory of a size from extents that leave, until close. It returns how many bytes the
// grant needs in extents of this size. The caller has the turn, and is about to make one.
func (s *stock) open(size int64) (needs int64) {
	if s.size != size {
		s.drop()
	}
	lacks := 0
	for _, w := range s.wants {
		there := w.Key.Extents(Aligned(w.Pages, w.Size))
		pieces, _ := plan(there, w.Pages, w.Size, s.dev.info.Granularity, s.dev.Budget())
		for _, of := range pieces {
			if of.x == nil && of.bytes() == size && !s.stay.has(w.Key, of.pages) {
				lacks++
			}
		}
	}
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	s.size, s.lacks, s.dev.stock = size, max(lacks, 1), s
	return size * int64(s.lacks)
}

func (s *stock) close() {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	s.dev.stock = nil
}

// allocate is the allocator of grants. It takes the device's own memory, for which it evicts idle extents, and
// otherwise pinned memory. For an extent that should be on the host it tries pinned memory first. It waits for nobody
// who holds memory. Pinned memory that it returns is counted as the tenant's.
func (s *stock) allocate(ctx context.Context, key Key, pages page.Range, by Tenant, _ func() bool) (found, error) {
	d, size := s.dev, piece{pages: pages}.bytes()
	stays := s.stay.has(key, pages)
	onHost := stays || key.Preference().OnHost
	if !onHost && !d.over(by.id(), size) {
		if got, err := s.allocateOwn(size, d.spare(size)); !errors.Is(err, gpubackend.ErrNoMemory) {
			return got, err
		}
	}
	mine, _, err := d.turn(ctx)
	if err != nil {
		return found{}, err
	}
	defer d.yield(mine)
	if onHost {
		got, err := d.allocateOnHost(ctx, size, by)
		refused := stays && ctx.Err() == nil && !errors.Is(err, gpubackend.ErrDeviceLost)
		if err == nil || !errors.Is(err, errFull) && !refused {
			return got, err
		}
	}
	needs := s.open(size)
	defer s.close()
	var last error // of allocateOwn
	for evicted := true; evicted; {
		if !d.over(by.id(), size) {
			got, err := s.allocateOwn(size, true)
			if !errors.Is(err, gpubackend.ErrNoMemory) {
				return got, err
			}
			last = err
		}
		evicted, err = d.evict(ctx, TierVRAM, by.id(), ForBracket, sparing{copied: true}, needs-d.room())
		if err != nil {
			return found{}, err
		}
	}
	got, err := d.allocateOnHost(ctx, size, by)
	return got, lacking(d, err, last)
}

// allocateOwn returns memory of the stock, which nobody else can wait for. Otherwise, if may is set, it allocates new
// memory of the device's own.
func (s *stock) allocateOwn(size int64, may bool) (found, error) {
	if mem := s.take(size); mem != nil {
		return found{TierVRAM, mem, true}, nil
	}
	if !may {
		return found{}, gpubackend.ErrNoMemory
	}
	mem, err := s.dev.alloc(size)
	if err != nil {
		return found{}, err
	}
	return found{TierVRAM, mem, !mem.Zeroed()}, nil
}
