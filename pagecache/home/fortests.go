package home

// SetBackingForTesting replaces the backing file, and closes neither.
func (h *Home) SetBackingForTesting(file Backing) { h.file = file }

// RefusesDirectForTesting reports whether home cannot be read past the host's page cache.
func (h *Home) RefusesDirectForTesting() bool { return h.noDirect.Load() }
