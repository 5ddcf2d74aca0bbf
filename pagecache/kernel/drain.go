package kernel

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// dropGap is the widest gap of clean pages between two dropped runs that is dropped along with them, to save a call.
const dropGap = 8

// maxRedrops bounds how often one release drops pages again that come back to the kernel.
const maxRedrops = 100

// Drop makes the kernel drop the pages that a release published. It unlocks the file while the kernel works. On return
// the kernel holds no old copy of them.
func (k *Kernel) Drop(drain lrc.Drain) {
	for tries := 0; len(drain.Pages) > 0 && tries <= maxRedrops; tries++ {
		if tries == maxRedrops {
			k.file.Outrun()
		}
		drain = k.drop(drain, tries == maxRedrops)
	}
}

// drop makes the kernel drop the pages of a drain. It returns the next drain, unless last says that this is the last
// try. Waiters of the drain wait for the next ones, too: until those are over, the kernel has pages that lack released
// bytes, and a program's write does not bring those bytes home first. drop unlocks the file while the kernel works.
func (k *Kernel) drop(drain lrc.Drain, last bool) (next lrc.Drain) {
	pages, done := k.pages, k.drains[drain.ID]
	if done == nil {
		done = make(chan struct{})
		k.drains[drain.ID] = done
	}
	k.mu.Unlock()
	k.tell(pages, drain.Pages)
	k.mu.Lock()
	if last {
		drain.GiveUp()
	} else {
		next = drain.Dropped()
	}
	delete(k.drains, drain.ID)
	if len(next.Pages) > 0 {
		k.drains[next.ID] = done
	} else {
		close(done)
	}
	return next
}

// tell makes the kernel write its dirty pages of the runs home, and drop all pages of them. The caller holds no lock.
func (k *Kernel) tell(pages Pages, drops []page.Range) {
	start := time.Now()
	joined := []page.Range{drops[0]}
	for _, d := range drops[1:] {
		if last := &joined[len(joined)-1]; d.Start-last.End <= dropGap {
			last.End = d.End
		} else {
			joined = append(joined, d)
		}
	}
	// One after the other: the kernel is slower with several at a time.
	for _, d := range joined {
		if err := pages.Invalidate(d.Offset(), d.Bytes()); err != nil && !errors.Is(err, syscall.ENOENT) {
			k.file.NotDropped(d, err)
		}
	}
	k.file.Dropped(len(joined), time.Since(start))
}

// Ends returns one channel per release that drains pages of rg now. Each is closed when its draining ends.
func (k *Kernel) Ends(rg page.Range) (ends []<-chan struct{}) {
	for _, id := range k.file.Draining(rg) {
		ends = append(ends, k.drains[id])
	}
	return ends
}

// Await waits for all pages of rg that are draining at the time of the call. When it returns nil, none of them drains
// for the same release any more. The caller does not hold the file's lock.
func (k *Kernel) Await(ctx context.Context, rg page.Range) error {
	if err := k.mu.LockIn(ctx); err != nil {
		return err
	}
	ends := k.Ends(rg)
	k.mu.Unlock()
	for _, end := range ends {
		select {
		case <-end:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
