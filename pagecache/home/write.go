package home

import (
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// WriteSize is the size in bytes beyond which larger writes to home gain nothing. Home is looked at again after as
	// many.
	WriteSize = 1 << 20
	// Adjacent runs of LeastParallel bytes or more are written by several cores at once, about ParallelSize at a time.
	// With parallelCores or more, that takes at most three times as long as a write of WriteSize by one core. With
	// fewer it is hardly faster than writes: each byte takes a core 1.7 times as long.
	LeastParallel = 4 << 20
	ParallelSize  = 8 << 20
	parallelCores = 4
	// LookAgain is how long after a look at home the last write begins that relies on it.
	LookAgain = 100 * time.Microsecond
)

// Write writes the pages of ranges home, up to end of file, and returns how many ranges were written. It may stop after
// limit bytes. Bytes that others append directly in SOURCE lie past the end that devices know. Devices have zeros
// there, so Write leaves these bytes alone. With careful set, the caller has looked at home; Write looks again before
// it writes, and fails with Changed.
func (h *Home) Write(ranges []page.Range, bufs [][]byte, careful bool, limit int64) (written int, err error) {
	noticed := h.changes
	if !careful {
		if noticed, err = h.file.Look(); err != nil {
			return 0, err
		}
	}
	sig, err := h.file.Signature()
	if err != nil {
		return 0, err
	}
	h.times.beginWriting(sig, noticed)
	for written < len(ranges) && err == nil && limit > 0 {
		n := 0
		n, err = h.writeSome(ranges[written:], bufs[written:], min(sig.Size, h.size), careful)
		for _, rg := range ranges[written : written+n] {
			limit -= rg.Bytes()
		}
		written += n
	}
	if failed := h.times.endWriting(h.file); failed != nil {
		h.m.Log.Debug("write-back cannot restore the time of modification", "file", h.o.Name(), "error", failed)
	}
	return written, err
}

// writeSome is Write for as many of ranges as one look is for, and bytes below size.
func (h *Home) writeSome(ranges []page.Range, bufs [][]byte, size int64, careful bool) (written int, err error) {
	changes, end, err := h.file.BeginWrites()
	if err != nil {
		return 0, err
	}
	defer end()
	if careful {
		if err := h.unchanged(changes); err != nil {
			return 0, err
		}
	}
	if written = h.writeParallel(ranges, bufs, size); written > 0 {
		return written, nil
	}
	bytes := int64(0)
	for began := time.Now(); written < len(ranges); {
		runs, n, err := h.writeNext(ranges[written:], bufs[written:], size, WriteSize-bytes)
		if err != nil {
			return written, err
		}
		written, bytes = written+runs, bytes+n
		if bytes >= WriteSize || time.Since(began) >= LookAgain {
			break
		}
	}
	return written, nil
}

// writeNext writes the first of ranges, up to size. Runs that adjoin it in the file and in memory are written with it,
// until there are most bytes. It returns the number of runs and of their bytes.
func (h *Home) writeNext(ranges []page.Range, bufs [][]byte, size, most int64) (runs int, n int64, err error) {
	rg, buf, runs := ranges[0], bufs[0], 1
	for _, next := range ranges[1:] {
		more := bufs[runs]
		if next.Start != rg.End || int64(len(buf)) >= most || cap(buf) == len(buf) ||
			&buf[:len(buf)+1][len(buf)] != &more[0] {
			break
		}
		rg.End, buf, runs = next.End, buf[:len(buf)+len(more)], runs+1
	}
	if n := min(rg.Bytes(), size-rg.Offset()); n > 0 {
		_, err = h.file.WriteAt(buf[:n], rg.Offset())
	}
	return runs, rg.Bytes(), err
}

// writeParallel writes the first of ranges and those that adjoin it in the file by several cores, if they are large
// enough and end before size. It returns the number of runs; 0 means that they have to be written in another way.
func (h *Home) writeParallel(ranges []page.Range, bufs [][]byte, size int64) (runs int) {
	file, ok := h.file.(ParallelWriter)
	if !ok {
		return 0
	}
	n := int64(0)
	for ; runs < len(ranges) && n < ParallelSize && ranges[runs].End.Offset() <= size; runs++ {
		if runs > 0 && ranges[runs].Start != ranges[runs-1].End {
			break
		}
		n += ranges[runs].Bytes()
	}
	if n < h.m.LeastParallel || !file.WriteParallel(bufs[:runs], ranges[0].Offset()) {
		return 0
	}
	h.o.Parallel(n >> page.Shift)
	return runs
}
