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
	lifeOf() *lifetime
	check(off, n int64) error
	bring(ctx context.Context, off, n int64, launder bool) (pages int64, err error)
}

// AcquireRange is a range of a window: Len bytes at Off.
type AcquireRange struct {
	Of       Window
	Off, Len int64
}

// filesOf checks ranges and returns their windows and files without duplicates. A window may have many files.
func filesOf(ranges []AcquireRange) (windows []Window, files []*File, err error) {
	seen := make(map[Window]bool)
	for _, r := range ranges {
		if err := r.Of.check(r.Off, r.Len); err != nil {
			return nil, nil, err
		}
		if !seen[r.Of] {
			seen[r.Of] = true
			windows = append(windows, r.Of)
		}
	}
	if len(windows) == 1 {
		return windows, windows[0].files(), nil
	}
	for _, w := range windows {
		files = append(files, w.files()...)
	}
	slices.SortFunc(files, func(a, b *File) int { return cmp.Compare(a.serial, b.serial) })
	return windows, slices.Compact(files), nil
}

// AcquireAll brings all ranges up to date, and returns how many pages were stale. The ranges then have all of every
// group up to version, and nothing of a later group. version is that of the newest group of the files, or 0 if there
// was none. If launder is set, the kernel's dirty pages of the ranges are flushed first. Errors: EINVAL (a range
// outside its window, or a window that has ended), and those of an acquire.
func (c *Cache) AcquireAll(ctx context.Context, ranges []AcquireRange,
	launder bool) (version uint64, pages int64, err error) {
	_, files, err := filesOf(ranges)
	if err != nil {
		return 0, 0, err
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

// AwaitVersion waits until a group with at least version least was released on a file of the ranges. It does not keep
// the windows from ending. Errors: EINVAL (as AcquireAll; also if a window ends during the wait), EPIPE (no program
// begins groups of the files any more, and one did since a window was made), and that of ctx.
func (c *Cache) AwaitVersion(ctx context.Context, ranges []AcquireRange, least uint64) error {
	windows, files, err := filesOf(ranges)
	if err != nil {
		return err
	}
	waits, end := context.WithCancelCause(ctx)
	defer end(nil)
	ended := errors.New("a window has ended")
	for _, w := range windows {
		defer context.AfterFunc(w.lifeOf().life, func() { end(ended) })()
	}
	err = c.publications.until(waits, func() (bool, error) {
		_, version, _ := look(files)
		writers, wrote := 0, false
		for _, f := range files {
			writers += f.published.writers
		}
		for _, w := range windows {
			wrote = wrote || ends(w.files()) > w.lifeOf().saw
		}
		if version < least && wrote && writers == 0 { // also if nobody waited when the last writer ended
			return false, fail(syscall.EPIPE, "the program that wrote %s ended before version %d; the file has version %d",
				files[0].Name(), least, version)
		}
		return version >= least, nil
	})
	if err != nil && context.Cause(waits) == ended {
		return fail(syscall.EINVAL, "a mapping ended during the wait for version %d", least)
	}
	return err
}
