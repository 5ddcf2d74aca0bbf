package pagecache

import (
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// keepHomeLocked keeps home's bytes of the runs that lrc wants kept before home changes in ranges. except is the device
// whose bytes are about to be collected.
func (f *File) keepHomeLocked(ranges []page.Range, except versions.Owner) error {
	var parts []lrc.PageBase
	for _, k := range f.lrc.KeepBases(ranges, except) {
		for part := range cut(k.Range, bufferPages) {
			parts = append(parts, lrc.PageBase{Range: part, Base: k.Base})
		}
	}
	kept := make([][]*pageBytes, len(parts))
	err := inParallel(len(parts), maxReaders, func(i int) error {
		buf := takeBuffer()
		defer giveBuffer(buf)
		b := buf[:parts[i].Range.Bytes()]
		if err := f.readHomeLocked(parts[i].Range, b); err != nil {
			return err
		}
		kept[i] = copyPages(b)
		return nil
	})
	for i, p := range parts {
		if kept[i] != nil { // also after an error: what was read is right
			f.putBasesLocked(p.Range, p.Base, kept[i])
		}
	}
	return err
}

// pageBytes is the content of a page.
type pageBytes [page.Size]byte

// Memory of bases and buffers goes round: fresh memory costs more than what is done with it.
var (
	freePages   = sync.Pool{New: func() any { return new(pageBytes) }}
	freeBuffers = sync.Pool{New: func() any { return new(buffer) }}
)

// bufferPages is the pages of a buffer, few enough for several processors to have a part of what is collected at once.
const bufferPages = 32

// buffer has room for bufferPages pages.
type buffer [bufferPages * page.Size]byte

// takeBuffer returns a buffer with anything in it, for giveBuffer to take back.
func takeBuffer() *buffer  { return freeBuffers.Get().(*buffer) }
func giveBuffer(b *buffer) { freeBuffers.Put(b) }

// copyPages returns copies of the pages of buf.
func copyPages(buf []byte) []*pageBytes {
	pages := make([]*pageBytes, len(buf)/page.Size)
	for i := range pages {
		pages[i] = freePages.Get().(*pageBytes)
		copy(pages[i][:], buf[i*page.Size:])
	}
	return pages
}

// putBasesLocked keeps what the pages of rg have in pages as their base b. The memory is the file's from now on.
func (f *File) putBasesLocked(rg page.Range, b lrc.Base, pages []*pageBytes) {
	before := len(f.bases)
	for i, content := range pages {
		f.bases[baseKey{rg.Start + page.Index(i), b}] = content
	}
	f.addBases(int64(len(f.bases) - before))
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
			key := baseKey{p, d.Base}
			if content := f.bases[key]; content != nil {
				freePages.Put(content)
				delete(f.bases, key)
			}
		}
	}
	f.addBases(int64(len(f.bases) - before))
}

func (f *File) dropAllBasesLocked() {
	f.addBases(-int64(len(f.bases)))
	clear(f.bases)
}
