package fs

import (
	"context"
	"errors"

	"github.com/gaiafs/gaiafs/pagecache"
)

// changeHome carries out a change of home: under the rules of the page cache if a device holds part of the file,
// directly otherwise. It calls do with the offset and length of the change, or of a part of it. The caller holds the
// gate read-locked, so no File is attached between the decision and do.
func (c *content) changeHome(ctx context.Context, change pagecache.Change, do func(off, n int64) error) error {
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
