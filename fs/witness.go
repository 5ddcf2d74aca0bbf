package fs

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// witness counts the changes made directly in SOURCE to the bytes of a file. Each holder of bytes (the kernel's pages,
// a pagecache.File's replicas) remembers the count up to which it has dealt with changes. A noticed change stays
// counted, so the mount's own changes cannot hide it.
//
// Changes are noticed by the file's size and times. They are compared when the file is opened, when a device acquires,
// before its released bytes are collected, and right before each change through the mount. Right after that change, the
// witness records the new attributes. During a change through the mount, times say nothing about foreign changes. The
// size is checked afterwards: it is foreign if the mount cannot have caused it. Other foreign changes in that time are
// noticed if fanotify reports them (events.go), and missed otherwise.
//
// Size and mtime change with bytes, ctime with attributes too. Programs may set mtime back, so a new ctime also counts
// as a change. A false count loses no bytes; it only makes holders look at them.
type witness struct {
	// changes is the number of changes noticed so far. Changed with mu held.
	changes atomic.Uint64
	// events sets told when others change the file; nil if the file is not watched. Package pagecache sets told too, if
	// it finds unexpected bytes.
	events atomic.Pointer[events]
	told   atomic.Bool
	// blurred says that the mount changed the file since events were last read, so attributes alone do not show who did
	// it.
	blurred atomic.Bool

	mu       sync.Mutex
	known    bool       // protected by mu
	last     attributes // as last seen or recorded; protected by mu
	inFlight int        // changes through the mount under way; protected by mu
	// modified is the mtime that the file has apart from changes under way, see keepModified. Protected by mu.
	modified unix.StatxTimestamp
	// reached is the longest size that the ended changes of an overlapping set may have given the file, or anySize.
	// Protected by mu.
	reached int64
}

// anySize is the reach of a change that may lengthen or shorten the file.
const anySize = -1

// attributes are compared to find out whether a file was changed.
type attributes struct {
	size         int64
	mtime, ctime unix.StatxTimestamp
}

func attributesOf(st *unix.Statx_t) attributes {
	return attributes{size: int64(st.Size), mtime: st.Mtime, ctime: st.Ctime}
}

// look compares the attributes of fd, unless a change through the mount is under way. It returns the number of foreign
// changes noticed so far.
func (w *witness) look(fd int) (changes uint64, err error) {
	w.drain()
	w.mu.Lock()
	defer w.mu.Unlock()
	err = w.lookLocked(fd)
	return w.changes.Load(), err
}

// lookAndBegin is look and then, unless it failed, begin.
func (w *witness) lookAndBegin(fd int) (changes uint64, err error) {
	w.drain()
	w.mu.Lock()
	defer w.mu.Unlock()
	if err = w.lookLocked(fd); err == nil {
		w.beganLocked()
	}
	return w.changes.Load(), err
}

// drain reads the events of the file if attributes alone do not show who changed it.
func (w *witness) drain() {
	if e := w.events.Load(); e != nil && w.blurred.Swap(false) {
		e.drain()
	}
}

func (w *witness) lookLocked(fd int) error {
	if w.inFlight > 0 {
		w.blurred.Store(true)
		if w.told.Swap(false) {
			w.changes.Add(1)
		}
		return nil
	}
	now, err := attributesOn(fd)
	if err != nil {
		w.known = false
		return err
	}
	w.compareLocked(now)
	return nil
}

// compareLocked records the attributes. It counts a change if they differ from the known ones.
func (w *witness) compareLocked(now attributes) {
	if told := w.told.Swap(false); told || w.known && now != w.last {
		w.changes.Add(1)
	}
	w.known, w.last = true, now
}

// agrees reports whether st is what is known of the file, or nothing is to be learnt from st.
func (w *witness) agrees(st *unix.Statx_t) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inFlight > 0 || !w.told.Load() && w.known && w.last == attributesOf(st)
}

// see is look for a caller that has just asked for the attributes.
func (w *witness) see(st *unix.Statx_t) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inFlight == 0 {
		w.compareLocked(attributesOf(st))
	}
}

// begin is called right before the mount changes the file or its metadata. It counts a foreign change before that. It
// returns the size of the file before this change and before others under way, or 0 if that is not known.
func (w *witness) begin(fd int) (size int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.lookLocked(fd) // on error, known is false
	w.beganLocked()
	if w.known {
		size = w.last.size
	}
	return size
}

// beginWith is begin for a caller that has just asked for the attributes.
func (w *witness) beginWith(st *unix.Statx_t) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inFlight == 0 {
		w.compareLocked(attributesOf(st))
	}
	w.beganLocked()
}

func (w *witness) beganLocked() {
	if w.inFlight == 0 {
		w.modified = w.last.mtime
	}
	w.inFlight++
	w.blurred.Store(true)
}

// end is called right after the change. reached is the size that the change may have given the file if it was shorter
// before; anySize allows any size. Of overlapping changes, the last one records the attributes.
func (w *witness) end(fd int, reached int64) {
	w.endAs(reached, func() (attributes, error) { return attributesOn(fd) })
}

// endAs is end with the attributes that ask returns.
func (w *witness) endAs(reached int64, ask func() (attributes, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if reached == anySize || w.reached == anySize {
		w.reached = anySize
	} else {
		w.reached = max(w.reached, reached)
	}
	w.blurred.Store(true)
	if w.inFlight--; w.inFlight > 0 {
		return
	}
	left, err := ask()
	before := w.last.size
	impossible := w.reached != anySize && (left.size < before || left.size > max(before, w.reached))
	if w.known && err == nil && impossible {
		w.changes.Add(1)
	}
	w.known, w.last, w.reached = err == nil, left, 0
}

// setModified calls set, which sets the file's mtime and is called during a change. mtime is the argument of utimensat.
func (w *witness) setModified(fd int, mtime unix.Timespec, set func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := set(); err != nil || mtime.Nsec == unix.UTIME_OMIT {
		return err
	}
	w.modified = statxTime(mtime)
	if mtime.Nsec == unix.UTIME_NOW {
		if now, err := attributesOn(fd); err == nil {
			w.modified = now.mtime
		}
	}
	return nil
}

// keepModified calls set with the file's mtime: that of before the present change, or the one that was set since.
func (w *witness) keepModified(set func(mtime unix.Timespec) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.known {
		return nil
	}
	return set(unix.Timespec{Sec: w.modified.Sec, Nsec: int64(w.modified.Nsec)})
}

// attributesOn returns the attributes of a descriptor, which may be opened with O_PATH.
func attributesOn(fd int) (attributes, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return attributes{}, err
	}
	return attributes{size: st.Size, mtime: statxTime(st.Mtim), ctime: statxTime(st.Ctim)}, nil
}

func statxTime(t unix.Timespec) unix.StatxTimestamp {
	return unix.StatxTimestamp{Sec: t.Sec, Nsec: uint32(t.Nsec)}
}

// touch is a change of a file's metadata in progress.
type touch struct {
	witness *witness // nil for nodes that were never opened
	size    int64    // as witness.begin returned it
	reached int64    // for witness.end
}

// touchOf returns the touch of n before its begin. Nodes that were never opened have no witness.
func touchOf(n *node) touch {
	if n != nil {
		if c := n.data.Load(); c != nil {
			return touch{witness: c.witness}
		}
	}
	return touch{}
}

// beginTouch is called before a request changes metadata of n, so that the new ctime is not taken for a foreign change.
// fd is a descriptor of n.
func beginTouch(n *node, fd int) touch {
	t := touchOf(n)
	if t.witness != nil {
		t.size = t.witness.begin(fd)
	}
	return t
}

// beginTouchWith is beginTouch for a caller that has just asked for the attributes.
func beginTouchWith(n *node, st *unix.Statx_t) touch {
	t := touchOf(n)
	if t.witness != nil {
		t.witness.beginWith(st)
	}
	return t
}

// end takes the attributes after the change, or nil if they are not known.
func (t touch) end(st *unix.Statx_t) {
	if t.witness == nil {
		return
	}
	t.witness.endAs(t.reached, func() (attributes, error) {
		if st == nil {
			return attributes{}, unix.ENODATA
		}
		return attributesOf(st), nil
	})
}

// endWith is end with the attributes that the descriptor of the node gives.
func (t touch) endWith(fd int) {
	if t.witness != nil {
		t.witness.end(fd, t.reached)
	}
}

// witnesses has the witnesses of files with an open pagecache.Home: the kernel may forget the node of such a file and
// look the file up again.
type witnesses struct {
	mu sync.Mutex
	m  map[inodeKey]*heldWitness // protected by mu
}

type heldWitness struct {
	*witness
	homes int // protected by witnesses.mu
}

// hold keeps the witness of k until unhold has been called as often.
func (ws *witnesses) hold(k inodeKey, w *witness) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.m == nil {
		ws.m = make(map[inodeKey]*heldWitness)
	}
	h := ws.m[k]
	if h == nil || h.witness != w {
		h = &heldWitness{witness: w}
		ws.m[k] = h
	}
	h.homes++
}

func (ws *witnesses) unhold(k inodeKey, w *witness) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	h := ws.m[k]
	if h == nil || h.witness != w {
		return // of an earlier file with this inode number
	}
	if h.homes--; h.homes == 0 {
		delete(ws.m, k)
	}
}

// get returns the witness that is held for k, or nil.
func (ws *witnesses) get(k inodeKey) *witness {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if h := ws.m[k]; h != nil {
		return h.witness
	}
	return nil
}
