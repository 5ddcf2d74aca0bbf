package pagecache

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// keepHomeLocked keeps home's bytes of the runs that lrc wants kept before home changes. except is the device whose
// bytes are about to be collected.
func (f *File) keepHomeLocked(rg page.Range, except versions.Owner) error {
	for _, k := range f.lrc.KeepBases(rg, except) {
		if err := batches(k.Range, func(part page.Range) error {
			buf := make([]byte, part.Bytes())
			if err := f.readHomeLocked(part, buf); err != nil {
				return err
			}
			f.putBaseLocked(part, k.Base, buf)
			return nil
		}); err != nil {
			return err
		}
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
	for _, d := range drop {
		for p := d.Range.Start; p < d.Range.End; p++ {
			key := baseKey{p, d.Base}
			if f.bases[key] != nil {
				delete(f.bases, key)
				f.addBases(-1)
			}
		}
	}
}

func (f *File) dropAllBasesLocked() {
	f.addBases(-int64(len(f.bases)))
	clear(f.bases)
}
