package fs

import (
	"context"
	"errors"

	"github.com/gaiafs/gaiafs/pagecache"
)

// changeHome carries out a change of home: under the rules where a device holds something of the file, else directly.
// do is called with the offset and length of the change, or of a part of it. The gate is read-locked, so nobody
// attaches a File between the decision and do.
func (c *content) changeHome(ctx context.Context, change pagecache.Change, do func(off, n int64) error) error {
	for {
		f := c.live()
		if f == nil {
			return do(change.Off, change.Len)
		}
		// The File may lose its last extent between the two; then do was not called.
		if err := f.ChangeHome(ctx, change, do); !errors.Is(err, pagecache.ErrDetached) {
			return err
		}
	}
}
