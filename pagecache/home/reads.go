package home

import "github.com/gaiafs/gaiafs/pagecache/mover"

// BeginRead counts a user of the backing file that works without the file's lock. It is called with the lock held.
// EndRead, which needs no lock, ends the use.
func (h *Home) BeginRead() {
	h.readsMu.Lock()
	defer h.readsMu.Unlock()
	h.reads++
}

// EndRead ends a use that BeginRead began.
func (h *Home) EndRead() {
	h.readsMu.Lock()
	defer h.readsMu.Unlock()
	if h.reads--; h.reads > 0 {
		return
	}
	for _, closing := range h.closing {
		if err := closing(); err != nil {
			h.m.Log.Warn("closing the backing file", "error", err)
		}
	}
	h.closing = nil
}

// CloseUnread calls what closes a backing file, or its locked pages, once no read is under way.
func (h *Home) CloseUnread(closing func() error) error {
	h.readsMu.Lock()
	defer h.readsMu.Unlock()
	if h.reads > 0 {
		h.closing = append(h.closing, closing)
		return nil
	}
	return closing()
}

// Source returns home as a source for filling devices. locked has its locked pages, or is nil. The caller calls
// BeginRead before it unlocks the file.
func (h *Home) Source(locked mover.Locked) *mover.Source {
	s := &mover.Source{Home: h.file}
	if locked != nil {
		s.Locked, s.Size = locked, h.size
		return s
	}
	direct, ok := h.file.(DirectReader)
	if !ok || h.m.Buffered || h.noDirect.Load() {
		return s
	}
	s.Direct, s.Size, s.Cold = direct, h.size, h.cold
	s.Hold = func() (giveBack func()) {
		h.BeginRead()
		h.m.Reads.Add(1)
		return func() {
			h.EndRead()
			h.m.Reads.Done()
		}
	}
	s.Refused = func(reason string) {
		if !h.noDirect.Swap(true) {
			h.m.noDirect(reason)
		}
	}
	return s
}
