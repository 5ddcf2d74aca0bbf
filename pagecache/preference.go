package pagecache

import (
	"math"
	"strings"

	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Preference says where what devices hold of files is to be, as far as there is a choice.
type Preference struct {
	// Path is of a file, or of a directory with all that is below it, relative to the mountpoint. Of several, the
	// innermost one counts.
	Path string
	residency.Preference
}

// SetPreferences replaces Options.Preferences. What is in memory stays there until somebody needs the memory.
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

// preference returns that of the file. It takes no lock.
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

// Preference implements residency.Key. A view has the highest priority of its files, and does not move.
func (v *View) Preference() residency.Preference {
	priority := math.MinInt
	for _, f := range v.files {
		priority = max(priority, f.preference().Priority)
	}
	return residency.Preference{Priority: priority}
}
