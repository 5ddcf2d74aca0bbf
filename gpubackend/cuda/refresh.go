package cuda

import (
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
)

const (
	// refreshSize is the number of bytes that the kernel gets for each page in addition to the page itself.
	refreshSize = 16
	// roundRefresh is the number of pages of one round.
	roundRefresh = upSize / (pageSize + refreshSize)
	refreshAt    = upSize - roundRefresh*pageSize
)

// known is a patch with an agreed digest: if the page has that digest, it equals the patch's base.
type known struct {
	move  // host is what the page is to be
	patch *gpubackend.Patch
}

// splitKnown splits patches into those with an agreed digest, and others.
func (d *device) splitKnown(patches []gpubackend.Patch) (with []known, without []gpubackend.Patch) {
	var look lookup
	n := 0
	for i := range patches {
		if patches[i].Agreed != nil {
			n++
		}
	}
	with = make([]known, 0, n)
	for i := range patches {
		p := &patches[i]
		if p.Agreed == nil {
			without = append(without, *p)
			continue
		}
		k := known{move{mem: p.Mem.(*memory), dev: p.Mem.(*memory).base + address(p.Off), host: p.Next}, p}
		k.pinned, k.direct = look.holds(p.Next)
		with = append(with, k)
	}
	return with, without
}

// refreshAll does the patches, a round at a time, in a job of the worker's lane. It returns the patches of pages that
// have another digest. Even with an error, it returns only when nothing is under way.
func (w *worker) refreshAll(ctx context.Context, work []known) (refused []gpubackend.Patch, err error) {
	for len(work) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n := min(len(work), roundRefresh)
		if refused, err = w.refreshPages(work[:n], refused); err != nil {
			return nil, err
		}
		work = work[n:]
	}
	return refused, nil
}

// refreshPages does one round.
func (w *worker) refreshPages(work []known, refused []gpubackend.Patch) ([]gpubackend.Patch, error) {
	table := w.host.bytes()
	pages := make([]move, len(work))
	for i, k := range work {
		pages[i] = k.move
		putWords(table[i*refreshSize:], uint64(k.dev), uint64(*k.patch.Agreed))
	}
	w.stage(refreshAt, pages, false)
	err := w.up(0, len(work)*refreshSize)
	if err == nil {
		err = w.between(refreshAt, pages, false)
	}
	if err == nil {
		err = w.launch(w.refresh, w.grid(len(work)),
			uint64(w.dev), uint64(w.dev+refreshAt), uint64(len(work)), uint64(w.dev+keyAt), uint64(w.dev+downAt))
	}
	if err == nil {
		err = w.down(downAt, len(work))
	}
	if err = w.finish(err); err != nil {
		return nil, err
	}
	for i, flag := range w.host.bytes()[downAt:][:len(work)] {
		if flag != 0 {
			refused = append(refused, *work[i].patch)
		}
	}
	return refused, nil
}
