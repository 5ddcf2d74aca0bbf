package pagecache

import "time"

// A release is the moment at which a file is modified: its mtime moves then, and not when somebody needs the bytes at
// home. A collect leaves mtime as it was, so what a program sets after a release stays. It cannot leave ctime as it
// was. Programs that compare ctime, as tar does to see whether a file changes while it reads, are shown the one from
// before as long as nobody but collects changed home.

// TimedHome is a Home whose mtime can be set. Its methods may be called from any goroutine.
type TimedHome interface {
	Home
	// Modified sets mtime to now, by the clock that the filesystem has for writes.
	Modified() error
	// SetModified sets mtime.
	SetModified(mtime time.Time) error
}

// TimedPages is a KernelPages that keeps a time of its own.
type TimedPages interface {
	KernelPages
	// Modified tells the kernel that the file was modified just now. It blocks as Invalidate does.
	Modified()
}

// shownTimes is what programs are shown instead of home's times.
type shownTimes struct {
	collecting bool      // home's times are anything
	left       time.Time // otherwise this is the ctime that the last collect left
	mtime      time.Time // while collecting
	ctime      time.Time
	began      time.Time // while collecting, the ctime of home before
	noticed    uint64    // while collecting, what Home.Look counted before
}

// ShownTimes returns what programs are to see where home has these times.
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

// beginWritingLocked says that released bytes are about to be written to a home with these times, of which so many
// changes of others were noticed. endWritingLocked gives home its mtime back.
func (f *File) beginWritingLocked(sig Signature, noticed uint64) {
	_, ctime := f.ShownTimes(sig.Mtime, sig.Ctime)
	f.shown.Store(&shownTimes{collecting: true, mtime: sig.Mtime, ctime: ctime, began: sig.Ctime, noticed: noticed})
}

// endWritingLocked leaves an mtime alone that the writes cannot have given home: somebody set it in SOURCE meanwhile.
// Where somebody changed home meanwhile, the times say so.
func (f *File) endWritingLocked() {
	t := f.shown.Load()
	if f.home.Noticed() != t.noticed {
		f.shown.Store(nil)
		return
	}
	sig, err := f.home.Signature()
	if h, ok := f.home.(TimedHome); ok && err == nil && !sig.Mtime.Before(t.began) && !sig.Mtime.After(sig.Ctime) {
		if err := h.SetModified(t.mtime); err != nil {
			f.c.log.Debug("write-back changes the time of modification", "file", f.Name(), "error", err)
		}
		sig, err = f.home.Signature()
	}
	if err != nil {
		f.shown.Store(nil)
		return
	}
	f.shown.Store(&shownTimes{left: sig.Ctime, ctime: t.ctime})
}

// modifiedNowLocked moves home's mtime to now.
func (f *File) modifiedNowLocked() {
	h, ok := f.home.(TimedHome)
	if !ok {
		return
	}
	if err := h.Modified(); err != nil {
		f.c.log.Warn("a release does not change the time of modification", "file", f.Name(), "error", err)
	}
}
