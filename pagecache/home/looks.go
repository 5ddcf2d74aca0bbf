package home

import "github.com/gaiafs/gaiafs/internal/page"

// Changed is the error for pages whose bytes in home are not those that replicas agreed on: home was changed directly
// in SOURCE since the last look. An empty list means that the pages are not known.
type Changed struct{ Pages []page.Range }

func (e *Changed) Error() string {
	return "the backing file was changed directly since it was last checked"
}

// Look finds out whether the backing file was changed directly in SOURCE, and returns the number of such changes so far
// (Backing.Look). It does not count as looked at.
func (h *Home) Look() (changes uint64, err error) { return h.file.Look() }

// Noticed returns what the last Look returned, or more, without looking.
func (h *Home) Noticed() uint64 { return h.file.Noticed() }

// LookedAt returns how many direct changes have been looked at.
func (h *Home) LookedAt() uint64 { return h.changes }

// HasLookedAt records that so many changes have been looked at.
func (h *Home) HasLookedAt(changes uint64) { h.changes = changes }

// ChangedBeside says that a direct change was detected from the bytes. The next Look counts it.
func (h *Home) ChangedBeside() { h.file.ChangedBeside() }

// AsSeen fails with Changed if the backing file was changed directly since the last look. It does not count as a look
// itself.
func (h *Home) AsSeen() error {
	n, err := h.file.Look()
	if err != nil {
		return err
	}
	return h.unchanged(n)
}

// unchanged fails with Changed if a look that found so many changes found new ones.
func (h *Home) unchanged(changes uint64) error {
	if changes != h.changes {
		return &Changed{}
	}
	return nil
}
