package pagecache

import (
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// If home does not take what devices released, a read gives the kernel pages with the released bytes merged in, and
// makes the kernel drop them again. A program may store into such a page by mmap before the kernel drops it. The kernel
// then writes back the whole page, with everything else as it was when it was read. Devices may have brought home more
// in between, if home takes bytes again. So only the bytes that the program changed are written home.

// mergedPage is a page that the kernel got merged, until it has dropped it.
type mergedPage struct {
	drain lrc.DrainID
	bytes pageBytes // as the kernel knows them
}

// gaveMergedLocked notes that the kernel gets the pages of a drain. bytes has the pages from first on.
func (f *File) gaveMergedLocked(drain lrc.Drain, first page.Index, bytes []byte) {
	if f.merged == nil {
		f.merged = make(map[page.Index]*mergedPage)
	}
	for _, rg := range drain.Pages {
		for p := rg.Start; p < rg.End; p++ {
			f.merged[p] = &mergedPage{drain.ID, pageBytes(bytes[(p - first).Offset():][:page.Size])}
		}
	}
}

// forgetMergedLocked notes that the kernel asks for the pages of rg, so it holds no copies of them. Reads without
// File.mu cannot note that. So there are none while f.merged has pages.
func (f *File) forgetMergedLocked(rg page.Range) {
	if len(f.merged) == 0 {
		return
	}
	for p := rg.Start; p < rg.End; p++ {
		delete(f.merged, p)
	}
}

// zeroedMergedLocked notes that the kernel's copies have zeros in bytes.
func (f *File) zeroedMergedLocked(bytes page.Bytes) {
	for p, x := range f.merged {
		if zero := bytes.Intersect(page.Range{Start: p, End: p + 1}.Span()); !zero.Empty() {
			clear(x.bytes[zero.Off-p.Offset() : zero.End-p.Offset()])
		}
	}
}

// droppedMergedLocked notes that the kernel dropped the pages of a drain.
func (f *File) droppedMergedLocked(drain lrc.Drain) {
	for _, rg := range drain.Pages {
		for p := rg.Start; p < rg.End; p++ {
			if x := f.merged[p]; x != nil && x.drain == drain.ID {
				delete(f.merged, p)
			}
		}
	}
}

// eachMergedLocked calls fn for the pages at off that the kernel got merged, with their bytes among those of sent, and
// as the kernel knows them.
func (f *File) eachMergedLocked(off int64, sent []byte, fn func(at page.Bytes, sent, known []byte) error) error {
	if len(f.merged) == 0 {
		return nil
	}
	all := page.Span(off, int64(len(sent)))
	for p := all.Pages().Start; p < all.Pages().End; p++ {
		if x := f.merged[p]; x != nil {
			at := all.Intersect(page.Range{Start: p, End: p + 1}.Span())
			err := fn(at, sent[at.Off-off:at.End-off], x.bytes[at.Off-p.Offset():at.End-p.Offset()])
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// storesOnlyLocked returns the bytes to write home for sent, which the kernel writes back at off: home's where no
// program changed them.
func (f *File) storesOnlyLocked(off int64, sent []byte) ([]byte, error) {
	merged := sent
	err := f.eachMergedLocked(off, sent, func(at page.Bytes, mine, known []byte) error {
		home := make([]byte, len(mine))
		if _, err := f.homeLocked().ReadAt(home, at.Off); err != nil {
			return err
		}
		if &merged[0] == &sent[0] {
			merged = slices.Clone(sent)
		}
		lrc.Merge3(merged[at.Off-off:at.End-off], known, mine, home)
		return nil
	})
	return merged, err
}

// kernelKnowsLocked notes that the kernel's copies have what a change made: the bytes that the kernel sent, or zeros.
func (f *File) kernelKnowsLocked(c Change, sent []byte) {
	switch {
	case c.Kind == ChangeZero:
		f.zeroedMergedLocked(page.Span(c.Off, c.Len))
	case !c.Direct:
		_ = f.eachMergedLocked(c.Off, sent, func(_ page.Bytes, mine, known []byte) error {
			copy(known, mine)
			return nil
		})
	}
}
