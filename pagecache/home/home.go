package home

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Options say whose home it is.
type Options struct {
	Name func() string // the file's name, for the log
	// Dev is the device number of the filesystem that home is on.
	Dev uint64
	// Parallel is told how many pages several cores wrote.
	Parallel func(pages int64)
}

// Home is the backing file of one file, and what is known of it. The file's lock guards its fields, unless they say
// otherwise.
type Home struct {
	m    *Mount          // immutable
	o    Options         // immutable
	cold *mover.ColdFile // what is known of reads of the disk; immutable
	file Backing
	// size is the size of the backing file after this mount's last change.
	size int64
	// changes is how many changes made directly in SOURCE have been looked at.
	changes uint64
	times   times
	// noDirect means that home cannot be read past the host's page cache. Set once.
	noDirect atomic.Bool

	readsMu sync.Mutex
	reads   int            // reads that run without the file's lock; guarded by readsMu
	closing []func() error // called when these have ended; guarded by readsMu
}

// New returns a Home that owns file. Call Meet before it is used.
func New(m *Mount, file Backing, o Options) *Home {
	return &Home{m: m, o: o, file: file, cold: mover.NewColdFile(m.coldWay(o.Dev))}
}

// Meet records the present state of the backing file. No device holds anything of it yet.
func (h *Home) Meet() (err error) {
	if h.changes, err = h.file.Look(); err != nil {
		return err
	}
	return h.NoteSize(0, math.MaxInt64)
}

// Backing returns the backing file.
func (h *Home) Backing() Backing { return h.file }

// Replace makes file, another open of the same file, the backing file. The former one is closed.
func (h *Home) Replace(file Backing) {
	_ = h.CloseUnread(h.file.Close)
	h.file = file
}

// Close closes the backing file once no read is under way.
func (h *Home) Close() error { return h.CloseUnread(h.file.Close) }

// ReadAt reads the backing file. It returns fewer bytes only at end of file, with a nil error.
func (h *Home) ReadAt(p []byte, off int64) (int, error) { return h.file.ReadAt(p, off) }

// Size returns the size of the backing file after this mount's last change.
func (h *Home) Size() int64 { return h.size }

// SetSize records a new size.
func (h *Home) SetSize(size int64) { h.size = size }

// NoteSize records the size after a change through the mount. That size is between least and most. Anything outside
// these bounds is a change made directly in SOURCE, and will be noticed as such.
func (h *Home) NoteSize(least, most int64) error {
	sig, err := h.file.Signature()
	if err != nil {
		return err
	}
	h.size = min(max(sig.Size, least), most)
	return nil
}

// Signature stats the backing file.
func (h *Home) Signature() (Signature, error) { return h.file.Signature() }

// Rights returns who may do what with the file. known is false if the backing file cannot tell.
func (h *Home) Rights() (rights Rights, known bool, err error) {
	file, known := h.file.(Guarded)
	if known {
		rights, err = file.Rights()
	}
	return rights, known, err
}

// Removed reports whether the file is known to have neither a name nor an open descriptor.
func (h *Home) Removed() bool {
	file, ok := h.file.(Removable)
	return ok && file.Removed()
}

// WriteBack returns a function that makes the host start to write n bytes at off to stable storage, or nil if the
// backing file has none (WriteBacker). The function needs no lock.
func (h *Home) WriteBack() (start func(off, n int64)) {
	if file, ok := h.file.(WriteBacker); ok {
		return file.StartWriteBack
	}
	return nil
}
