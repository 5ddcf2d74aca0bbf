package cuda

import (
	"context"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/mapped"
)

// Copy engines take more than a microsecond for each piece, however small. So many scattered pages are copied side by
// side, in one piece, between the host and the worker's memory, and a page kernel scatters or gathers them there. This
// does not pay on a GPU that runs other programs' kernels: a page kernel has to wait for its time slice there, and copy
// engines do not.
const (
	// leastScatter is the number of pieces from which kernels are faster. mostScattered is the size of a piece up to
	// which they are.
	leastScatter  = 64
	mostScattered = 4 * pageSize
	// roundScatter is the number of pages of one round: with their addresses they fit into upSize.
	roundScatter = upSize / (pageSize + 8)
	pagesAt      = upSize - roundScatter*pageSize
	// If the GPU's part of a round takes longer than slowRound plus slowPage for each page, the round had to wait for
	// other kernels, and took longer than copy engines would have. Then copy engines do the copies for some time.
	slowRound = 2 * time.Millisecond
	slowPage  = 4 * time.Microsecond
	slowFor   = 100 * time.Millisecond
)

// slowness records until when copy engines do the work of page kernels. Its methods may be called from any goroutine.
type slowness struct {
	patience time.Duration // the limit of a round; immutable
	until    atomic.Int64  // nanoseconds since epoch
}

var epoch = time.Now()

func (s *slowness) is() bool              { return time.Since(epoch) < time.Duration(s.until.Load()) }
func (s *slowness) lasts(d time.Duration) { s.until.Store(int64(time.Since(epoch) + d)) }

// splitScattered splits pieces into those for page kernels and others. Page kernels copy small pieces of whole pages if
// there are many.
func splitScattered(pieces []gpubackend.Copy) (small, others []gpubackend.Copy) {
	fits := func(p *gpubackend.Copy) bool {
		return p.Row == 0 && p.Off%pageSize == 0 && len(p.Host)%pageSize == 0 && len(p.Host) <= mostScattered
	}
	n := 0
	for i := range pieces {
		if fits(&pieces[i]) {
			n++
		}
	}
	switch {
	case n < leastScatter:
		return nil, pieces
	case n == len(pieces):
		return pieces, nil
	}
	for i := range pieces {
		if fits(&pieces[i]) {
			small = append(small, pieces[i])
		} else {
			others = append(others, pieces[i])
		}
	}
	return small, others
}

// scatterPieces copies pieces by page kernels. It returns the pieces for which copy engines are the better choice.
func (d *device) scatterPieces(ctx context.Context, pieces []gpubackend.Copy, toHost bool) (left []move, err error) {
	n := 0
	for _, p := range pieces {
		n += len(p.Host) / pageSize
	}
	pages := make([]move, 0, n)
	var look lookup
	for _, p := range pieces {
		pinned, direct := look.holds(p.Host)
		m := p.Mem.(*memory)
		for off := 0; off < len(p.Host); off += pageSize {
			pages = append(pages, move{mem: m, dev: m.base + address(p.Off) + address(off),
				host: p.Host[off : off+pageSize], direct: direct, pinned: pinned})
		}
	}
	if d.worker.slow.is() {
		return pages, nil
	}
	err = d.run(ctx, d.workLane, func() error {
		round := func(some []move) error { return d.worker.scatterPages(some, toHost) }
		var err error
		pages, err = inRounds(ctx, d.worker, pages, roundScatter, round)
		return err
	})
	return pages, err
}

// inRounds lets the worker copy pages in its lane, at most most at a time. If its kernels have to wait for other
// kernels, it stops and returns the remaining pages.
func inRounds[P any](ctx context.Context, w *worker, pages []P, most int,
	round func(some []P) error) (left []P, err error) {
	for len(pages) > 0 && !w.slow.is() {
		if err := ctx.Err(); err != nil {
			return pages, err
		}
		n := min(len(pages), most)
		if err := round(pages[:n]); err != nil {
			return pages, err
		}
		pages = pages[n:]
	}
	return pages, nil
}

// took records how long a round of so many pages took.
func (w *worker) took(d time.Duration, pages int) {
	if d > w.slow.patience+time.Duration(pages)*slowPage {
		w.slow.lasts(slowFor)
	}
}

// scatterPages does one round, in the worker's lane.
func (w *worker) scatterPages(pages []move, toHost bool) error {
	host := w.host.bytes()
	for i, m := range pages {
		putWords(host[8*i:], uint64(m.dev))
	}
	if !toHost && !w.stage(pagesAt, pages, false) {
		return gpubackend.ErrHostGone
	}
	start := time.Now()
	err := w.up(0, 8*len(pages))
	if err == nil && !toHost {
		err = w.between(pagesAt, pages, false)
	}
	kernel := w.scatter
	if toHost {
		kernel = w.gather
	}
	if err == nil {
		err = w.launch(kernel, uint32(len(pages)), uint64(w.dev), uint64(w.dev+pagesAt))
	}
	if err == nil && toHost {
		err = w.between(pagesAt, pages, true)
	}
	if err = w.finish(err); err != nil {
		return err
	}
	w.took(time.Since(start), len(pages))
	if toHost {
		w.stage(pagesAt, pages, true)
	}
	return nil
}

// stage copies between the worker's page-locked memory, from `from` on, and pages that are not page-locked. It reports
// whether all these were there.
func (w *worker) stage(from int, pages []move, out bool) (all bool) {
	n := 0
	for i := range pages {
		if !pages[i].direct {
			n++
		}
	}
	if n == 0 {
		return true
	}
	var gone atomic.Bool
	staging := w.host.bytes()[from:]
	inParallel(len(pages), n*pageSize, func(i int) {
		switch here := staging[i*pageSize:][:pageSize]; {
		case pages[i].direct:
		case out:
			copy(pages[i].host, here)
		case !mapped.Try(func() { copy(here, pages[i].host) }):
			gone.Store(true)
		}
	})
	return !gone.Load()
}

// between queues the copies between the host and the worker's device memory, where the pages are side by side from
// `there` on. Pages that are side by side in the host's memory too are one copy, unless it would span two allocations.
func (w *worker) between(there int, pages []move, toHost bool) error {
	drv := w.lane.drv
	at := func(i int) address {
		if pages[i].direct {
			return address(uintptr(unsafe.Pointer(unsafe.SliceData(pages[i].host))))
		}
		return w.host.at(there + i*pageSize)
	}
	for from := 0; from < len(pages); {
		to := from + 1
		for to < len(pages) && pages[to].direct == pages[from].direct && pages[to].pinned == pages[from].pinned &&
			at(to) == at(from)+address((to-from)*pageSize) {
			to++
		}
		dev, n := w.dev+address(there+from*pageSize), uintptr((to-from)*pageSize)
		var err error
		if toHost {
			err = drv.check("cuMemcpyDtoHAsync", drv.memcpyDtoHAsync(at(from), dev, n, w.lane.stream))
		} else {
			err = drv.check("cuMemcpyHtoDAsync", drv.memcpyHtoDAsync(dev, at(from), n, w.lane.stream))
		}
		if err != nil {
			return err
		}
		from = to
	}
	return nil
}

// roundPeer is the number of pages of one round from memory to memory: with two addresses for each page they fit into
// upSize.
const roundPeer = min(roundScatter, pagesAt/16)

// splitPeer splits moves into those for page kernels and others. Page kernels copy small moves of whole pages if there
// are many. The kernels access 16 bytes at a time.
func splitPeer(moves []peerMove) (small, others []peerMove) {
	for _, m := range moves {
		if m.n%pageSize == 0 && m.n <= mostScattered && (m.to|m.base)%16 == 0 {
			small = append(small, m)
		} else {
			others = append(others, m)
		}
	}
	if len(small) < leastScatter {
		return nil, moves
	}
	return small, others
}

// scatterPeer copies pages from memory that this GPU can address, by page kernels: one kernel gathers them side by
// side, and another scatters them. It returns the moves that are left to the copy engines.
func (d *device) scatterPeer(ctx context.Context, moves []peerMove) (left []peerMove, err error) {
	if d.worker.slow.is() {
		return moves, nil
	}
	var pages []peerMove
	for _, m := range moves {
		for off := address(0); off < address(m.n); off += pageSize {
			pages = append(pages, peerMove{from: m.from, to: m.to + off, base: m.base + off, n: pageSize})
		}
	}
	err = d.run(ctx, d.workLane, func() error {
		if err := d.openAll(moves); err != nil {
			return err
		}
		var err error
		pages, err = inRounds(ctx, d.worker, pages, roundPeer, d.worker.scatterPeerPages)
		return err
	})
	return pages, err
}

// scatterPeerPages does one round, in the worker's lane.
func (w *worker) scatterPeerPages(pages []peerMove) error {
	host, n := w.host.bytes(), len(pages)
	for i, m := range pages {
		putWords(host[8*i:], uint64(m.base))
		putWords(host[8*(n+i):], uint64(m.to))
	}
	start := time.Now()
	err := w.up(0, 16*n)
	if err == nil {
		err = w.launch(w.gather, uint32(n), uint64(w.dev), uint64(w.dev+pagesAt))
	}
	if err == nil {
		err = w.launch(w.scatter, uint32(n), uint64(w.dev)+uint64(8*n), uint64(w.dev+pagesAt))
	}
	if err = w.finish(err); err != nil {
		return err
	}
	w.took(time.Since(start), n)
	return nil
}
