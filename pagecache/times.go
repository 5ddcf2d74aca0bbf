package pagecache

import "time"

// A release is the moment at which a file is modified. Its mtime moves then, not when the bytes come home. A collect
// restores mtime, so an mtime that a program sets after a release stays. A collect cannot restore ctime. Some programs
// compare ctime: tar does so to see whether a file changes while it reads. Such programs are shown the earlier ctime as
// long as only collects changed home.

// TimedHome is a Home whose mtime can be set. Its methods may be called from any goroutine.
type TimedHome interface {
	Home
	// Modified sets mtime to now, by the filesystem's clock for writes.
	Modified() error
	// SetModified sets mtime.
	SetModified(mtime time.Time) error
}

// TimedPages is a KernelPages that keeps times of its own.
type TimedPages interface {
	KernelPages
	// Modified tells the kernel that the file was modified just now. It blocks as Invalidate does.
	Modified()
}

// shownTimes holds the times that programs are shown instead of home's.
type shownTimes struct {
	collecting bool      // home's times may be anything
	left       time.Time // otherwise: the ctime that the last collect left
	mtime      time.Time // while collecting
	ctime      time.Time
	began      time.Time // while collecting: home's ctime before
	noticed    uint64    // while collecting: Home.Noticed before
}

// ShownTimes returns the times to show to programs if home has the given ones.
func (f *File) ShownTimes(mtime, ctime time.Time) (shownMtime, shownCtime time.Time) {
	switch t := f.shown.Load(); {
	case t == nil:
	case t.collecting:
		return t.mtime, t.ctime
	case t.left.Equal(ctime):
		return mtime, t.ctime
	}
	return mtime, ctime
}

// beginWritingLocked notes that released bytes are about to be written to home, which has these times and has noticed
// so many changes by others. endWritingLocked restores home's mtime.
func (f *File) beginWritingLocked(sig Signature, noticed uint64) {
	_, ctime := f.ShownTimes(sig.Mtime, sig.Ctime)
	f.shown.Store(&shownTimes{collecting: true, mtime: sig.Mtime, ctime: ctime, began: sig.Ctime, noticed: noticed})
}

// endWritingLocked restores mtime, unless the writes cannot have caused home's present mtime: then it was set in SOURCE
// during the collect. If others changed home during the collect, programs are shown home's own times.
func (f *File) endWritingLocked() {
	t := f.shown.Load()
	if noticed, err := f.home.Look(); err != nil || noticed != t.noticed {
		f.shown.Store(nil)
		return
	}
	sig, err := f.home.Signature()
	if h, ok := f.home.(TimedHome); ok && err == nil && !sig.Mtime.Before(t.began) && !sig.Mtime.After(sig.Ctime) {
		if err := h.SetModified(t.mtime); err != nil {
			f.c.log.Debug("write-back cannot restore the time of modification", "file", f.Name(), "error", err)
		}
		sig, err = f.home.Signature()
	}
	if err != nil {
		f.shown.Store(nil)
		return
	}
	f.shown.Store(&shownTimes{left: sig.Ctime, ctime: t.ctime})
}

// modifiedNowLocked sets home's mtime to now.
func (f *File) modifiedNowLocked() {
	h, ok := f.home.(TimedHome)
	if !ok {
		return
	}
	if err := h.Modified(); err != nil {
		f.c.log.Warn("a release cannot set the time of modification", "file", f.Name(), "error", err)
	}
}
