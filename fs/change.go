package fs

import (
	"context"
	"errors"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// A kernel that caches writes keeps mtime itself. It sends mtime after the bytes, unless that was the file's mtime
// already: its clock stands still for some milliseconds at a time. So a change that it asks for leaves home's mtime as
// it was. Otherwise programs would see a time that SOURCE does not have, until the kernel forgets the file.

// changeHome carries out a change of home: under the rules of the page cache if a device holds part of the file,
// directly otherwise. It calls do with the offset and length of the change, or of a part of it. fd is a descriptor of
// the file. The caller holds the gate read-locked, so no File is attached between the decision and do, and has told the
// witness of the change.
func (c *content) changeHome(
	ctx context.Context, fs *fileSystem, fd int, change pagecache.Change, do func(off, n int64) error,
) error {
	if fs.writeBack && change.Kind != pagecache.ChangeTimes {
		do = c.keepingModified(fs, fd, do)
	}
	for {
		f := c.live()
		if f == nil {
			return do(change.Off, change.Len)
		}
		// The File may be detached after live returned it. Then do was not called.
		if err := f.ChangeHome(ctx, change, do); !errors.Is(err, pagecache.ErrDetached) {
			return err
		}
	}
}

// keepingModified returns a function that calls do, and then sets home's mtime back. If the daemon may not set it,
// because it runs as an ordinary user and the file belongs to another one, mtime moves.
func (c *content) keepingModified(fs *fileSystem, fd int, do func(off, n int64) error) func(off, n int64) error {
	return func(off, n int64) error {
		err := do(off, n)
		_ = c.witness.keepModified(func(mtime unix.Timespec) error {
			return setTimesOf(fs, fd, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, mtime})
		})
		return err
	}
}

// setTimesOf sets the times of the file that fd is open on.
func setTimesOf(fs *fileSystem, fd int, times []unix.Timespec) error {
	return unix.UtimesNanoAt(fs.procDir, strconv.Itoa(fd), times, 0)
}
