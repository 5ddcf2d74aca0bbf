package cuda

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	pageSize = page.Size
	// upSize and downSize are the numbers of bytes that one round of kernels gets and returns.
	upSize   = 8 << 20
	downSize = 2 << 20
	// roundPages and roundRuns are the numbers of pages of one round of digests, and of their runs. They fit into
	// upSize and downSize.
	roundPages = downSize / 8
	roundRuns  = 1 << 16
	// The blocks of the page kernels have 8 warps, one page each; this many blocks fill a multiprocessor.
	blockThreads = 256
	blocksPerSM  = 8
)

// runSize is the size in bytes of a run for the kernels: the address of the first of several pages that are side by
// side, and its number in the round.
const runSize = 16

// worker runs the page kernels, in jobs of its lane. It owns a module, device memory, and page-locked memory of the
// same layout: first the upload area, then the download area, then the key.
type worker struct {
	lane     *lane
	module   moduleHandle
	digests  functionHandle
	modified functionHandle
	patch    functionHandle
	scatter  functionHandle
	gather   functionHandle
	refresh  functionHandle
	slow     slowness
	blocks   uint32 // that fill the device
	event    eventHandle
	halves   [2]eventHandle // of patches
	dev      address
	host     pinned
}

const (
	downAt = upSize
	keyAt  = upSize + downSize
	// workSize needs no rounding: the driver aligns its allocations.
	workSize = keyAt + gpubackend.DigestKeySize
)

func newWorker(l *lane, handle deviceHandle, key *gpubackend.DigestKey, ptx []byte) (w *worker, err error) {
	w = &worker{lane: l, slow: slowness{patience: slowRound}}
	defer func() {
		if err != nil {
			_ = w.free()
			w = nil
		}
	}()
	drv := l.drv
	multiprocessors, err := drv.attribute(handle, attrMultiprocessors)
	if err != nil {
		return w, err
	}
	w.blocks = uint32(multiprocessors) * blocksPerSM
	if err := w.load(ptx); err != nil {
		return w, err
	}
	for _, e := range w.events() {
		if err := drv.check("cuEventCreate", drv.eventCreate(e, eventBlocking|eventNoTiming)); err != nil {
			return w, err
		}
	}
	if err := drv.check("cuMemAlloc", drv.memAlloc(&w.dev, workSize)); err != nil {
		return w, err
	}
	if w.host, err = drv.pin(workSize); err != nil {
		return w, err
	}
	words, err := key.AppendBinary(nil)
	if err != nil {
		return w, err
	}
	copy(w.host.bytes()[keyAt:], words)
	return w, w.finish(w.up(keyAt, len(words)))
}

// load lets the driver compile the kernels for this GPU. It copies the PTX to add the zero that must end it.
func (w *worker) load(ptx []byte) error {
	drv := w.lane.drv
	image := append(append([]byte{}, ptx...), 0)
	err := drv.check("cuModuleLoadDataEx", drv.moduleLoadDataEx(&w.module, &image[0], 0, nil, nil))
	runtime.KeepAlive(image)
	if err != nil {
		return fmt.Errorf("%w: the page kernels are not for this GPU or driver: %w", ErrUnavailable, err)
	}
	for _, f := range []struct {
		name     string
		function *functionHandle
	}{{"gaiafs_digests\x00", &w.digests}, {"gaiafs_modified\x00", &w.modified}, {"gaiafs_patch\x00", &w.patch},
		{"gaiafs_scatter\x00", &w.scatter}, {"gaiafs_gather\x00", &w.gather}, {"gaiafs_refresh\x00", &w.refresh}} {
		name := []byte(f.name)
		if err := drv.check("cuModuleGetFunction", drv.moduleGetFunction(f.function, w.module, &name[0])); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) events() []*eventHandle { return []*eventHandle{&w.event, &w.halves[0], &w.halves[1]} }

func (w *worker) free() error {
	drv := w.lane.drv
	if w.host.base != nil {
		_ = drv.memFreeHost(w.host.base)
	}
	if w.dev != 0 {
		_ = drv.memFree(w.dev)
	}
	for _, e := range w.events() {
		if *e != 0 {
			_ = drv.eventDestroy(*e)
		}
	}
	if w.module != 0 {
		_ = drv.moduleUnload(w.module)
	}
	return nil
}

// up and down queue copies of n bytes at off between the page-locked and the device's memory. The page-locked bytes
// must not be touched until the lane has synchronised.
func (w *worker) up(off, n int) error {
	drv := w.lane.drv
	return drv.check("cuMemcpyHtoDAsync", drv.memcpyHtoDAsync(w.dev+address(off), w.host.at(off), uintptr(n),
		w.lane.stream))
}

func (w *worker) down(off, n int) error {
	drv := w.lane.drv
	return drv.check("cuMemcpyDtoHAsync", drv.memcpyDtoHAsync(w.host.at(off), w.dev+address(off), uintptr(n),
		w.lane.stream))
}

// launch queues a kernel whose parameters are all words.
func (w *worker) launch(f functionHandle, blocks uint32, words ...uint64) error {
	params := make([]unsafe.Pointer, len(words))
	for i := range words {
		params[i] = unsafe.Pointer(&words[i])
	}
	drv := w.lane.drv
	err := drv.check("cuLaunchKernel", drv.launchKernel(f, blocks, 1, 1, blockThreads, 1, 1, 0, w.lane.stream,
		&params[0], nil))
	// The driver has copied the words when the call returns.
	runtime.KeepAlive(words)
	runtime.KeepAlive(params)
	return err
}

// finish waits for everything queued; err is the error so far. Afterwards the worker owns the page-locked memory again,
// even with an error.
func (w *worker) finish(err error) error {
	if err == nil {
		err = w.lane.sync(w.event)
	}
	if err != nil {
		_ = w.lane.drv.streamSynchronize(w.lane.stream)
	}
	return err
}

func (w *worker) zero(ctx context.Context, base address, n int64) error {
	drv := w.lane.drv
	for n > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := min(n, zeroSize)
		if err := drv.check("cuMemsetD8Async", drv.memsetD8Async(base, 0, uintptr(part), w.lane.stream)); err != nil {
			return err
		}
		if err := w.finish(nil); err != nil {
			return err
		}
		base += address(part)
		n -= part
	}
	return nil
}

// putWords stores words little-endian, the order of GPUs.
func putWords(p []byte, words ...uint64) {
	for i, w := range words {
		binary.LittleEndian.PutUint64(p[8*i:], w)
	}
}
