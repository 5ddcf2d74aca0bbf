package kernel

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
	bytes [page.Size]byte // as the kernel knows them
}

// HasMerged reports whether the kernel has merged pages. Reads without the file's lock cannot call Reads, so there are
// none meanwhile.
func (k *Kernel) HasMerged() bool { return len(k.merged) > 0 }

// Reads notes that the kernel asks for the pages of rg, so it holds no copies of them.
func (k *Kernel) Reads(rg page.Range) {
	if len(k.merged) == 0 {
		return
	}
	for p := rg.Start; p < rg.End; p++ {
		delete(k.merged, p)
	}
}

// GetsMerged notes that the kernel gets the pages of rg although something of them is pending, and makes it drop them
// after the current read is answered. bytes are what it gets, or nil if the read fails. run runs a function in a
// goroutine that the mount waits for.
func (k *Kernel) GetsMerged(rg page.Range, bytes []byte, run func(func())) {
	drain := k.file.CPUReadMerged(rg)
	if len(drain.Pages) == 0 {
		return
	}
	if bytes != nil {
		k.remember(drain, rg.Start, bytes)
	}
	k.drains[drain.ID] = make(chan struct{})
	run(func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.drop(drain, true)
		k.forget(drain)
	})
}

// remember keeps the pages of a drain as the kernel gets them. bytes has the pages from first on.
func (k *Kernel) remember(drain lrc.Drain, first page.Index, bytes []byte) {
	if k.merged == nil {
		k.merged = make(map[page.Index]*mergedPage)
	}
	for _, rg := range drain.Pages {
		for p := rg.Start; p < rg.End; p++ {
			k.merged[p] = &mergedPage{drain.ID, [page.Size]byte(bytes[(p - first).Offset():][:page.Size])}
		}
	}
}

// forget notes that the kernel dropped the pages of a drain.
func (k *Kernel) forget(drain lrc.Drain) {
	for _, rg := range drain.Pages {
		for p := rg.Start; p < rg.End; p++ {
			if x := k.merged[p]; x != nil && x.drain == drain.ID {
				delete(k.merged, p)
			}
		}
	}
}

// each calls fn for the merged pages at off, with their bytes among those of sent, and as the kernel knows them.
func (k *Kernel) each(off int64, sent []byte, fn func(at page.Bytes, sent, known []byte) error) error {
	if len(k.merged) == 0 {
		return nil
	}
	all := page.Span(off, int64(len(sent)))
	for p := all.Pages().Start; p < all.Pages().End; p++ {
		if x := k.merged[p]; x != nil {
			at := all.Intersect(page.Range{Start: p, End: p + 1}.Span())
			err := fn(at, sent[at.Off-off:at.End-off], x.bytes[at.Off-p.Offset():at.End-p.Offset()])
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// StoresOnly returns the bytes to write home for sent, which the kernel writes back at off: home's where no program
// changed them. readHome reads home. sent does not change.
func (k *Kernel) StoresOnly(off int64, sent []byte, readHome func(p []byte, off int64) (int, error)) ([]byte, error) {
	merged := sent
	err := k.each(off, sent, func(at page.Bytes, mine, known []byte) error {
		home := make([]byte, len(mine))
		if _, err := readHome(home, at.Off); err != nil {
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

// Sends notes that the kernel's copies have the bytes that it sent.
func (k *Kernel) Sends(off int64, sent []byte) {
	_ = k.each(off, sent, func(_ page.Bytes, mine, known []byte) error {
		copy(known, mine)
		return nil
	})
}

// Zeroes notes that the kernel's copies have zeros in bytes.
func (k *Kernel) Zeroes(bytes page.Bytes) {
	for p, x := range k.merged {
		if zero := bytes.Intersect(page.Range{Start: p, End: p + 1}.Span()); !zero.Empty() {
			clear(x.bytes[zero.Off-p.Offset() : zero.End-p.Offset()])
		}
	}
}
