package pagecache

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// keepHomeLocked keeps home's bytes of the runs that lrc wants kept before home changes in ranges. except is the device
// whose bytes are about to be collected.
func (f *File) keepHomeLocked(ranges []page.Range, except versions.Owner) error {
	var parts []lrc.PageBase
	for _, k := range f.lrc.KeepBases(ranges, except) {
		_ = batches(k.Range, func(part page.Range) error {
			parts = append(parts, lrc.PageBase{Range: part, Base: k.Base})
			return nil
		})
	}
	// A few at a time, so that what was read and not yet kept stays small.
	for len(parts) > 0 {
		n := min(len(parts), pieceRuns)
		bufs := make([][]byte, n)
		if err := inParallel(n, maxReaders, func(i int) error {
			bufs[i] = make([]byte, parts[i].Range.Bytes())
			return f.readHomeLocked(parts[i].Range, bufs[i])
		}); err != nil {
			return err
		}
		for i, buf := range bufs {
			f.putBaseLocked(parts[i].Range, parts[i].Base, buf)
		}
		parts = parts[n:]
	}
	return nil
}

// putBaseLocked keeps the bytes of the pages of rg, which buf holds, as their base b.
func (f *File) putBaseLocked(rg page.Range, b lrc.Base, buf []byte) {
	for p := rg.Start; p < rg.End; p++ {
		copied := new([page.Size]byte)
		copy(copied[:], buf[(p-rg.Start).Offset():])
		key := baseKey{p, b}
		if f.bases[key] == nil {
			f.addBases(1)
		}
		f.bases[key] = copied
	}
}

func (f *File) addBases(n int64) {
	f.counters.Bases.Add(n)
	if total := f.c.baseBytes.Add(n * page.Size); n > 0 && total > f.c.baseLimit {
		select {
		case f.c.relieve <- struct{}{}:
		default:
		}
	}
}

// dropBasesLocked forgets bases that nobody has any more.
func (f *File) dropBasesLocked(drop []lrc.PageBase) {
	if len(drop) == 0 {
		return
	}
	before := len(f.bases)
	for _, d := range drop {
		for p := d.Range.Start; p < d.Range.End; p++ {
			delete(f.bases, baseKey{p, d.Base})
		}
	}
	f.addBases(int64(len(f.bases) - before))
}

func (f *File) dropAllBasesLocked() {
	f.addBases(-int64(len(f.bases)))
	clear(f.bases)
}
