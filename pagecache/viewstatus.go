package pagecache

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// ViewStatus describes a view, and what it holds of one of its files.
type ViewStatus struct {
	Device int    `json:"device"`
	User   uint32 `json:"user"` // its programs share the view
	// Bytes is the size of the view, DeviceBytes the device memory of its extents, HostBytes the part of --host-memory
	// that its list of segments takes.
	Bytes       int64 `json:"bytes"`
	DeviceBytes int64 `json:"device_bytes"`
	HostBytes   int64 `json:"host_bytes"`
	Segments    int   `json:"segments"`
	Files       int   `json:"files"`
	Mappings    int   `json:"mappings"`
	// FileBytes is how many of Bytes come from the file.
	FileBytes int64 `json:"file_bytes"`
	// Resident counts the pages of the file with bytes in the memory of the view. Stale pages of them are not up to
	// date: they changed, or were not copied yet. Clean pages are the others. Map is as in HoldingStatus.
	Resident int64  `json:"resident_pages"`
	Clean    int64  `json:"clean_pages"`
	Stale    int64  `json:"stale_pages"`
	Map      string `json:"map"`
}

// Held returns how many bytes of the file the view holds: up to date, and stale. A stale page takes a page's part of
// FileBytes with it, because the view may have only some of a page's bytes.
func (v ViewStatus) Held() (clean, stale int64) {
	if v.Resident == 0 {
		return 0, 0
	}
	held := min(v.FileBytes, v.Resident<<page.Shift)
	stale = int64(float64(held) * float64(v.Stale) / float64(v.Resident))
	return held - stale, stale
}

// viewStatuses describes the views of a file with so many pages. Each letter of their maps stands for width pages. It
// does not take File.mu.
func viewStatuses(f *File, width, pages page.Index) (list []ViewStatus) {
	if width == 0 { // the size is not known
		width, pages = page.Count(view.MaxSize), 0
	}
	f.views.mu.Lock()
	parts := append([]*viewPart(nil), f.views.parts...)
	f.views.mu.Unlock()
	for _, p := range parts {
		list = append(list, p.status(width, pages))
	}
	return list
}

func (p *viewPart) status(width, pages page.Index) ViewStatus {
	v := p.v
	cells := make([]view.Counts, max(1, (pages+width-1)/width))
	p.state.Count(width, p.gone(), cells)
	s := ViewStatus{
		Device: v.dev.info.Ordinal, User: v.user, Bytes: v.layout.Size(), DeviceBytes: v.memory(), HostBytes: v.host,
		Segments: len(v.layout.Segments()), Files: len(v.parts), Mappings: len(v.snapshotMappings()),
		FileBytes: p.of.Bytes(),
	}
	letters := make([]byte, len(cells))
	for i, c := range cells {
		s.Resident += c.Pages
		s.Stale += c.Stale
		letters[i] = mapLetter(c.Pages, c.Stale, 0)
	}
	s.Clean, s.Map = s.Resident-s.Stale, string(letters)
	return s
}

// mapLetter returns the letter of a map for a part of a file with so many pages.
func mapLetter(resident, stale, dirty int64) byte {
	switch {
	case dirty > 0:
		return 'd'
	case stale > 0:
		return 's'
	case resident > 0:
		return 'c'
	}
	return '.'
}

// memory returns the device memory of the view, in bytes.
func (v *View) memory() (n int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.extents {
		n += x.Size()
	}
	return n
}

// gone returns the pages of the file whose bytes in the view have no memory: they were evicted. If rows of a file are
// evicted, the pages between them count, too.
func (p *viewPart) gone() (list []page.Range) {
	v := p.v
	left := []page.Range{{End: page.Count(v.layout.Size())}}
	v.mu.Lock()
	for _, x := range v.extents {
		left = page.Subtract(left, x.Pages())
	}
	v.mu.Unlock()
	for _, rg := range left {
		for number, b := range v.layout.Sources(rg.Span()) {
			if number == p.of.Number() {
				list = append(list, b.Pages())
			}
		}
	}
	return list
}
