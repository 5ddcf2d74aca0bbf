package home

import (
	"sync/atomic"
	"time"
)

// A release is the moment at which a file is modified. Its mtime moves then, not when the bytes come home. A collect
// restores mtime, so an mtime that a program sets after a release stays. A collect cannot restore ctime. Some programs
// compare ctime: tar does so to see whether a file changes while it reads. Such programs are shown the earlier ctime as
// long as only collects changed home.

// shownTimes holds the times that programs are shown instead of home's.
type shownTimes struct {
	collecting bool      // home's times may be anything
	left       time.Time // otherwise: the ctime that the last collect left
	mtime      time.Time // while collecting
	ctime      time.Time
	began      time.Time // while collecting: home's ctime before
	noticed    uint64    // while collecting: Home.Noticed before
}

// times are the times of a file that programs are shown. They change with the file's lock held.
type times struct{ now atomic.Pointer[shownTimes] }

// ShownTimes returns the times to show to programs if the backing file has the given ones. It needs no lock.
func (h *Home) ShownTimes(mtime, ctime time.Time) (shownMtime, shownCtime time.Time) {
	return h.times.shown(mtime, ctime)
}

func (t *times) shown(mtime, ctime time.Time) (shownMtime, shownCtime time.Time) {
	switch t := t.now.Load(); {
	case t == nil:
	case t.collecting:
		return t.mtime, t.ctime
	case t.left.Equal(ctime):
		return mtime, t.ctime
	}
	return mtime, ctime
}

// beginWriting notes that released bytes are about to be written to home, which has these times and has noticed so many
// changes by others.
func (t *times) beginWriting(sig Signature, noticed uint64) {
	_, ctime := t.shown(sig.Mtime, sig.Ctime)
	t.now.Store(&shownTimes{collecting: true, mtime: sig.Mtime, ctime: ctime, began: sig.Ctime, noticed: noticed})
}

// endWriting restores home's mtime, unless the writes cannot have caused home's present mtime: then it was set in
// SOURCE during the collect. If others changed home during the collect, programs are shown home's own times. failed
// says why mtime could not be restored.
func (t *times) endWriting(file Backing) (failed error) {
	was := t.now.Load()
	if noticed, err := file.Look(); err != nil || noticed != was.noticed {
		t.now.Store(nil)
		return nil
	}
	sig, err := file.Signature()
	if timed, ok := file.(Timed); ok && err == nil && !sig.Mtime.Before(was.began) && !sig.Mtime.After(sig.Ctime) {
		failed = timed.SetModified(was.mtime)
		sig, err = file.Signature()
	}
	if err != nil {
		t.now.Store(nil)
		return failed
	}
	t.now.Store(&shownTimes{left: sig.Ctime, ctime: was.ctime})
	return failed
}

// Modified sets the mtime of the backing file to now, if it can be set.
func (h *Home) Modified() error {
	if file, ok := h.file.(Timed); ok {
		return file.Modified()
	}
	return nil
}
