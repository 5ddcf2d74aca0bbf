package pagecache

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// timedHome is a home with times. Writes set them, and a writer in SOURCE may do so right after.
type timedHome struct {
	*memoryHome
	mtime, ctime time.Time
	after        func(h *timedHome)
}

func (h *timedHome) Signature() (Signature, error) {
	sig, err := h.memoryHome.Signature()
	sig.Mtime, sig.Ctime = h.mtime, h.ctime
	return sig, err
}

func (h *timedHome) WriteAt(p []byte, off int64) (int, error) {
	n, err := h.memoryHome.WriteAt(p, off)
	h.ctime = h.ctime.Add(time.Second)
	h.mtime = h.ctime
	h.after(h)
	return n, err
}

func (h *timedHome) Modified() error { return h.SetModified(h.ctime.Add(time.Second)) }

func (h *timedHome) SetModified(mtime time.Time) error {
	h.ctime = h.ctime.Add(time.Second)
	h.mtime = mtime
	return nil
}

// TestTimesOfOthersStay sets mtime in SOURCE while released bytes are written home.
func TestTimesOfOthersStay(t *testing.T) {
	start := time.Unix(1e9, 0)
	for name, set := range map[string]time.Time{"nobody": {}, "past": start.Add(-time.Hour),
		"future": start.Add(time.Hour)} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1)
			src := m.file(2 * page.Size)
			p := m.run(src, 0, 0, 2*page.Size, true)
			h := &timedHome{memoryHome: src.home, mtime: start, ctime: start}
			h.after = func(h *timedHome) {
				if !set.IsZero() {
					require.NoError(t, h.SetModified(set))
				}
			}
			f := src.attached
			f.mu.Lock()
			f.home.SetBackingForTesting(h)
			f.mu.Unlock()
			p.store(0, 3)
			p.release()
			released := h.mtime
			require.NoError(t, f.Sync(t.Context(), nil))
			require.True(t, bytes.Equal([]byte{3}, src.home.bytes(0, 1)))
			want := released
			if !set.IsZero() {
				want = set
			}
			require.True(t, want.Equal(h.mtime), "%v, not %v", h.mtime, want)
		})
	}
}

// TestTimesOfChangesInSourceStay changes the file in SOURCE while released bytes are written home: before the last
// look, or after it. Neither mtime nor the ctime that programs are shown is from before the change.
func TestTimesOfChangesInSourceStay(t *testing.T) {
	for _, seen := range []bool{false, true} {
		t.Run(fmt.Sprintf("seen %v", seen), func(t *testing.T) {
			m := newMachine(t, 1)
			src := m.file(3 * page.Size)
			p := m.run(src, 0, 0, 3*page.Size, true)
			start := time.Unix(1e9, 0)
			h := &timedHome{memoryHome: src.home, mtime: start, ctime: start}
			var changed time.Time
			at := 2*page.Size + 20
			if !seen {
				at = page.Size + 20 // of a page that is not written
			}
			h.after = func(h *timedHome) {
				if !seen || changed.IsZero() {
					src.home.editAt(at, []byte{5})
					require.NoError(t, h.Modified())
					changed = h.mtime
				}
				if seen {
					outlastLook()
				}
			}
			f := src.attached
			f.mu.Lock()
			f.home.SetBackingForTesting(h)
			f.mu.Unlock()
			p.store(0, 3)
			p.store(2*page.Size, 4)
			p.release()
			require.NoError(t, f.Sync(t.Context(), nil))
			require.Equal(t, []byte{4}, src.home.bytes(2*page.Size, 1))
			require.Equal(t, []byte{5}, src.home.bytes(at, 1))
			require.True(t, changed.Equal(h.mtime), "%v, not %v", h.mtime, changed)
			_, shown := f.ShownTimes(h.mtime, h.ctime)
			require.False(t, shown.Before(changed), "%v is before %v", shown, changed)
		})
	}
}
