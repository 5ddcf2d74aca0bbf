package cleanread

import (
	"context"

	"github.com/gaiafs/gaiafs/internal/page"
)

// FetchesMore reports whether CPU reads bring more from some device than what they are for.
func (c *Cache) FetchesMore() bool { return c.fetchesMore }

// ArrivedForTesting reports whether everything that is read ahead has arrived.
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

// AheadForTesting reads pages of a file of size bytes ahead.
func (f *File) AheadForTesting(ctx context.Context, rg page.Range, size int64, home Home) {
	f.expect(page.Range{End: 1}, size)
	f.readAhead(ctx, []page.Range{rg}, home)
}

// ForgiveForTesting forgets how many chunks came to nothing.
func (f *File) ForgiveForTesting() {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	f.table.debt = 0
}

// ProbeHomeForTesting reads home only to measure.
func (f *File) ProbeHomeForTesting(rg page.Range) { f.probeHome(rg) }
