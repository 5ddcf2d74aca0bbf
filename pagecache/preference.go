package pagecache

import (
	"strings"

	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Preference says where devices should keep their bytes of files, if there is a choice.
type Preference struct {
	// Path names a file, or a directory with everything below it, relative to the mountpoint. The innermost match
	// counts.
	Path string
	residency.Preference
}

// SetPreferences replaces Options.Preferences. Extents stay where they are until the memory is needed.
func (c *Cache) SetPreferences(list []Preference) {
	lowest := 0
	for _, p := range list {
		lowest = min(lowest, p.Priority)
	}
	c.preferences.Store(&list)
	for _, d := range c.devices {
		d.room.SetLowest(lowest)
	}
}

// preference returns the file's preference. It takes no lock.
func (f *File) preference() (found residency.Preference) {
	all := f.c.preferences.Load()
	if all == nil || len(*all) == 0 {
		return found
	}
	best, name := -1, f.Name()
	for _, p := range *all {
		if len(p.Path) > best && (name == p.Path || strings.HasPrefix(name, p.Path+"/")) {
			best, found = len(p.Path), p.Preference
		}
	}
	return found
}

// Preference implements residency.Key.
func (h *holding) Preference() residency.Preference { return h.f.preference() }
