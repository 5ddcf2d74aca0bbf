package pagecache

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"syscall"
)

// Window is a Mapping or a ViewMapping.
type Window interface {
	files() []*File
	cache() *Cache
	lifeOf() *lifetime
	check(off, n int64) error
	bring(ctx context.Context, off, n int64, launder bool) (pages int64, err error)
}

// AcquireRange is the Len bytes at Off of a window.
type AcquireRange struct {
	Of       Window
	Off, Len int64
}

// AcquireAll brings all ranges up to date, and returns how many pages were not. What it brings has all of every group up to
// version, and nothing of a later one; version is that of the newest group of the files, 0 if there was none. With least, it first
// waits until that is at least so high. With launder, the kernel's dirty pages of the ranges are flushed before.
//
// Errors: EINVAL (a range outside its window, or a window that has ended, also while this waits), EPIPE (the last program
// ended that began groups of the files, before the version came), that of ctx, and those of an acquire.
func (c *Cache) AcquireAll(ctx context.Context, ranges []AcquireRange, launder bool, least uint64) (version uint64, pages int64, err error) {
	var files []*File
	for _, r := range ranges {
		if err := r.Of.check(r.Off, r.Len); err != nil {
			return 0, 0, err
		}
		if len(ranges) == 1 {
			files = r.Of.files()
			break
		}
		files = append(files, r.Of.files()...)
	}
	if len(ranges) > 1 {
		slices.SortFunc(files, func(a, b *File) int { return cmp.Compare(a.serial, b.serial) })
		files = slices.Compact(files)
	}
	if least > 0 {
		if err := c.awaitIn(ctx, ranges, files, least); err != nil {
			return 0, 0, err
		}
	}
	return c.atOneVersion(ctx, files, func() (pages int64, err error) {
		for _, r := range ranges {
			n, err := r.Of.bring(ctx, r.Off, r.Len, launder)
			if pages += n; err != nil {
				return pages, err
			}
		}
		launder = false // done
		return pages, nil
	})
}

// awaitIn is awaitVersion that ends with any of the windows. It does not keep them from ending.
func (c *Cache) awaitIn(ctx context.Context, ranges []AcquireRange, files []*File, least uint64) error {
	waits, end := context.WithCancelCause(ctx)
	defer end(nil)
	ended := errors.New("a window has ended")
	for _, r := range ranges {
		defer context.AfterFunc(r.Of.lifeOf().life, func() { end(ended) })()
	}
	err := c.awaitVersion(waits, files, least)
	if err != nil && context.Cause(waits) == ended {
		return fail(syscall.EINVAL, "a mapping ended while version %d was waited for", least)
	}
	return err
}
