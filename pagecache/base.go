package pagecache

import (
	"bytes"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// keeping is what home has in the runs that lrc wants kept before home changes there.
type keeping struct {
	parts []lrc.PageBase
	pages [][]*pageBytes // of each part, once it was read
}

// keepingLocked asks lrc what is to be kept before home changes in ranges. except is the device whose bytes are about to be
// collected.
func (f *File) keepingLocked(ranges []page.Range, except versions.Owner) (k keeping) {
	for _, b := range f.lrc.KeepBases(ranges, except) {
		for part := range cut(b.Range, bufferPages) {
			k.parts = append(k.parts, lrc.PageBase{Range: part, Base: b.Base})
		}
	}
	k.pages = make([][]*pageBytes, len(k.parts))
	return k
}

// read reads home. File.mu is held, perhaps by somebody who waits.
func (k *keeping) read(f *File) error {
	return inParallel(len(k.parts), maxReaders, func(i int) error {
		buf := takeBuffer()
		defer giveBuffer(buf)
		b := buf[:k.parts[i].Range.Bytes()]
		if err := f.readHomeLocked(k.parts[i].Range, b); err != nil {
			return err
		}
		k.pages[i] = copyPages(b)
		return nil
	})
}

// keepLocked keeps what was read, which is right whatever became of the rest. Where something could not be read home does not
// change.
func (f *File) keepLocked(k keeping) {
	var not []lrc.PageBase
	for i, p := range k.parts {
		if k.pages[i] != nil {
			f.putBasesLocked(p.Range, p.Base, k.pages[i])
		} else {
			not = append(not, p)
		}
	}
	f.lrc.NotKept(not)
}

// keepHomeLocked keeps home's bytes of the runs that lrc wants kept before home changes in ranges.
func (f *File) keepHomeLocked(ranges []page.Range, except versions.Owner) error {
	k := f.keepingLocked(ranges, except)
	err := k.read(f)
	f.keepLocked(k)
	return err
}

// pageBytes is the content of a page.
type pageBytes [page.Size]byte

// zeroPage is every copy of a page of zeros: a new file is full of them, and many programs write into new files. Nobody writes it.
var zeroPage = new(pageBytes)

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

// copyPages returns copies of the pages of buf. Those of zeros are one, which must not be written.
func copyPages(buf []byte) []*pageBytes {
	pages := make([]*pageBytes, len(buf)/page.Size)
	for i := range pages {
		p := buf[i*page.Size:][:page.Size]
		if bytes.Equal(p, zeroPage[:]) {
			pages[i] = zeroPage
			continue
		}
		pages[i] = freePages.Get().(*pageBytes)
		copy(pages[i][:], p)
	}
	return pages
}

// putBasesLocked keeps what the pages of rg have in pages as their base b. The memory is the file's from now on.
func (f *File) putBasesLocked(rg page.Range, b lrc.Base, pages []*pageBytes) {
	n := int64(0)
	for i, content := range pages {
		key := baseKey{rg.Start + page.Index(i), b}
		n += copies(content) - copies(f.bases[key])
		f.bases[key] = content
	}
	f.addBases(n)
}

// copies is how many pages of memory a base takes.
func copies(content *pageBytes) int64 {
	if content == nil || content == zeroPage {
		return 0
	}
	return 1
}

// addBases counts n more copies.
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
	n := int64(0)
	for _, d := range drop {
		for p := d.Range.Start; p < d.Range.End; p++ {
			key := baseKey{p, d.Base}
			content := f.bases[key]
			if copies(content) > 0 {
				freePages.Put(content)
				n++
			}
			delete(f.bases, key)
		}
	}
	f.addBases(-n)
}

func (f *File) dropAllBasesLocked() {
	n := int64(0)
	for _, content := range f.bases {
		n += copies(content)
	}
	f.addBases(-n)
	clear(f.bases)
}
