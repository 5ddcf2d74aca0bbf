package pagecache

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// pendingOf returns the pages of rg that owner o released and home does not have yet.
func pendingOf(f *lrc.File, rg page.Range, o versions.Owner) (pages []page.Range) {
	for _, x := range f.PendingOf(rg, o) {
		pages = page.AppendRange(pages, x.Range)
	}
	return pages
}
