package fs

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// witness counts the changes that others make to the bytes of a file in SOURCE directly, beside the mount. Whoever
// keeps something of the bytes (the kernel its pages, a pagecache.File its replicas) remembers the count up to which it
// has dealt with them. A change that was noticed stays counted, so the mount's own changes cannot hide it.
//
// A change is noticed by the size and the times of the file. They are compared when the file is opened, when a device
// acquires, before its released bytes are collected, and right before each change through the mount. What that change
// leaves is recorded right after it. While a change through the mount is under way, times say nothing about others, and
// the size only afterwards, where it is not one that the mount can have given the file. What else others do meanwhile
// is noticed where fanotify reports it (events.go), and goes unnoticed elsewhere.
//
// Size and mtime tell of bytes, ctime alone of attributes too. Since programs may set mtime back, another ctime counts
// as a change all the same: it makes nobody lose bytes, only look at them.
type witness struct {
	// changes is what was noticed so far. It changes with mu held.
	changes atomic.Uint64
	// events are those that set told when others changed the file; nil where it is not watched. Package pagecache sets
	// it too, where it finds other bytes than it should.
	events atomic.Pointer[events]
	told   atomic.Bool
	// blurred says that the mount changed the file since events were last read: attributes alone do not tell who did.
	blurred atomic.Bool

	mu       sync.Mutex
	known    bool       // protected by mu
	last     attributes // as they were last seen or left; protected by mu
	inFlight int        // changes through the mount under way; protected by mu
	// reached is how long the changes that ended while others were under way may have made the file, or anySize.
	// Protected by mu.
	reached int64
}

// anySize is the reach of a change that may make the file longer or shorter.
const anySize = -1

// attributes are what tells that a file was changed.
type attributes struct {
	size         int64
	mtime, ctime unix.StatxTimestamp
}

func attributesOf(st *unix.Statx_t) attributes {
	return attributes{size: int64(st.Size), mtime: st.Mtime, ctime: st.Ctime}
}

// look asks fd for the attributes, unless a change through the mount is under way, and returns how many changes of
// others were noticed so far.
func (w *witness) look(fd int) (changes uint64, err error) {
	if e := w.events.Load(); e != nil && w.blurred.Swap(false) {
		e.drain()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	err = w.lookLocked(fd)
	return w.changes.Load(), err
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

// compareLocked counts a change if the attributes are others than those that are known, and records them.
func (w *witness) compareLocked(now attributes) {
	if told := w.told.Swap(false); told || w.known && now != w.last {
		w.changes.Add(1)
	}
	w.known, w.last = true, now
}

// see is look for a caller who has just asked for the attributes.
func (w *witness) see(st *unix.Statx_t) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inFlight == 0 {
		w.compareLocked(attributesOf(st))
	}
}

// begin is called right before the mount changes the file, or its metadata. What it finds out about others counts from
// then on. It returns the size that the file has, or had before other changes that are under way; 0 if that is not
// known.
func (w *witness) begin(fd int) (size int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.lookLocked(fd) // what cannot be asked for is not known
	w.beganLocked()
	if w.known {
		size = w.last.size
	}
	return size
}

// beginWith is begin for a caller who has just asked for the attributes.
func (w *witness) beginWith(st *unix.Statx_t) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inFlight == 0 {
		w.compareLocked(attributesOf(st))
	}
	w.beganLocked()
}

func (w *witness) beganLocked() {
	w.inFlight++
	w.blurred.Store(true)
}

// end is called right after the change. The change made the file at most reached bytes long if it was not that long
// before; anySize says nothing. Of changes that overlap, the last one records what they left.
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

// attributesOn asks a descriptor. One that is opened with O_PATH will do.
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
	size    int64    // that witness.begin returned
	reached int64    // of witness.end
}

// touchOf returns the touch of n, of which nothing has begun. It costs nothing for nodes that were never opened.
func touchOf(n *node) touch {
	if n != nil {
		if c := n.data.Load(); c != nil {
			return touch{witness: c.witness}
		}
	}
	return touch{}
}

// beginTouch is called before a request changes metadata of n, so that the new ctime is not taken for somebody else's
// doing. fd is a descriptor of n.
func beginTouch(n *node, fd int) touch {
	t := touchOf(n)
	if t.witness != nil {
		t.size = t.witness.begin(fd)
	}
	return t
}

// beginTouchWith is beginTouch for a caller who has just asked for the attributes.
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

// witnesses has those of files of which a pagecache.Home is open: the kernel may forget the node meanwhile and look it
// up again.
type witnesses struct {
	mu sync.Mutex
	m  map[inodeKey]*heldWitness // protected by mu
}

type heldWitness struct {
	*witness
	homes int // protected by witnesses.mu
}

// hold keeps the witness of k until unhold was called as often.
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
		return // of a file that had the number before
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
