package cleanread

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// FetchesMore reports whether CPU reads from some device bring additional pages.
func (c *Cache) FetchesMore() bool { return c.fetchesMore }

// ArrivedForTesting reports whether all chunks that are being read ahead have arrived.
func (f *File) ArrivedForTesting() bool {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	for _, k := range f.table.chunks {
		select {
		case <-k.ready:
		default:
			return false
		}
	}
	return true
}

// ChunksForTesting returns the number of chunks of the file.
func (f *File) ChunksForTesting() int {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	return len(f.table.chunks)
}

// AheadForTesting reads ahead pages of a file of size bytes.
func (f *File) AheadForTesting(ctx context.Context, rg page.Range, size int64, home Home) {
	f.expect(page.Range{End: 1}, size)
	f.readAhead(ctx, []page.Range{rg}, home)
}

// ForgiveForTesting resets the count of useless chunks.
func (f *File) ForgiveForTesting() {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	f.table.debt = 0
}

// ProbeHomeForTesting reads home only to measure.
func (f *File) ProbeHomeForTesting(rg page.Range) { f.probeHome(rg) }

// WaitForDevicesForTesting makes readers wait for devices as long as it takes. A busy machine may be slower than any
// bound.
func (c *Cache) WaitForDevicesForTesting() { c.Patience, c.ChunkPatience = time.Minute, time.Minute }
