package residency

import (
	"context"
	"errors"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// stock has a grant use the memory that its victims leave: to give it to the driver, to ask for new memory, and to
// export and zero that, takes longer than to copy what comes into it. A stock lives as long as one try at a grant. What
// it has left then goes to the driver.
type stock struct {
	dev   *Device
	by    Tenant
	wants []Want

	size  int64               // of the memory that is kept; protected by Device.mu
	lacks int                 // how much of it may be kept; protected by Device.mu
	mems  []gpubackend.Memory // protected by Device.mu
}

// passesTo reports whether a user may be given memory which users had, and may have still: nobody but that user, or
// nobody any more. Where exports for reading are only for that, the first is not enough: the user may have it for
// writing, and may not write what is to come there. Nor is it of memory that a client abandoned.
func (d *Device) passesTo(user uint32, mem gpubackend.Memory, had []uint32) bool {
	others := slices.ContainsFunc(had, func(u uint32) bool { return u != user })
	return !others && !d.info.ReadOnlyExports || !mem.Held()
}

// keep takes memory that an extent had, if it is for the stock. had are the users who may have been given it.
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

// take is Device.alloc of what the stock has: nil where it has nothing of the size.
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

// drop gives the rest to the driver.
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

// open has memory of a size come into the stock when extents leave, until close. It returns how many bytes of it the
// grant needs. The caller has the turn, and is about to make one extent of that size.
func (s *stock) open(size int64) (needs int64) {
	if s.size != size {
		s.drop()
	}
	lacks := 0
	for _, w := range s.wants {
		there := w.Key.Extents(Aligned(w.Pages, w.Size))
		pieces, _ := plan(there, w.Pages, w.Size, s.dev.info.Granularity, s.dev.Budget())
		for _, of := range pieces {
			if of.x == nil && of.bytes() == size {
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

// allocate is the allocator of grants: the device's own memory, for which idle extents go, and else pinned memory. For
// a Key that is to be on the host it is pinned memory first. It waits for nobody who holds memory. What it returns of
// pinned memory is counted as the tenant's.
func (s *stock) allocate(ctx context.Context, key Key, size int64, by Tenant, _ func() bool) (found, error) {
	d := s.dev
	onHost := key.Preference().OnHost
	if !onHost && !d.over(by.id()) {
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
		if got, err := d.allocateOnHost(ctx, size, by); !errors.Is(err, errFull) {
			return got, err
		}
	}
	needs := s.open(size)
	defer s.close()
	for evicted := true; evicted; {
		if !d.over(by.id()) {
			if got, err := s.allocateOwn(size, true); !errors.Is(err, gpubackend.ErrNoMemory) {
				return got, err
			}
		}
		evicted, err = d.evict(ctx, TierVRAM, by.id(), ForBracket, sparing{copied: true}, needs-d.room())
		if err != nil {
			return found{}, err
		}
	}
	return d.allocateOnHost(ctx, size, by)
}

// allocateOwn returns memory of the stock, which is nobody else's to wait for, or new memory of the device's own, where
// that may be taken.
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
