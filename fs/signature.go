package fs

import (
	"sync"

	"golang.org/x/sys/unix"
)

// signature tells at an open whether somebody changed the bytes of a file in SOURCE directly, so that the kernel's pages
// of it are out of date. It is recorded anew after each change through the mount.
//
// While a change is under way nothing can be said, and the open is let through: the change records what it leaves. A
// change underneath that falls between the last two changes through the mount is therefore not seen; one that falls
// after the last is.
type signature struct {
	mu       sync.Mutex
	known    bool
	size     int64
	mtime    unix.StatxTimestamp
	ctime    unix.StatxTimestamp
	inFlight int    // changes under way
	changes  uint64 // changes begun
}

// begin says that a change through the mount starts.
func (s *signature) begin() {
	s.mu.Lock()
	s.inFlight++
	s.changes++
	s.mu.Unlock()
}

// end says that a change is over and left the file with these attributes; without, nothing is known any more.
func (s *signature) end(valid bool, size int64, mtime, ctime unix.StatxTimestamp) {
	s.mu.Lock()
	s.inFlight--
	s.known = valid
	s.size, s.mtime, s.ctime = size, mtime, ctime
	s.mu.Unlock()
}

// changing reports whether a change through the mount is under way.
func (s *signature) changing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inFlight > 0
}

// snapshot returns a mark to compare and record with, to be taken before the file is asked for its attributes.
func (s *signature) snapshot() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changes
}

// differs reports whether the file was changed underneath, given attributes read after mark was taken.
func (s *signature) differs(mark uint64, st *unix.Statx_t) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.known || s.inFlight > 0 || s.changes != mark {
		return false
	}
	return s.size != int64(st.Size) || s.mtime != st.Mtime || s.ctime != st.Ctime
}

// record takes attributes read after mark was taken, unless a change came between.
func (s *signature) record(mark uint64, st *unix.Statx_t) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inFlight > 0 || s.changes != mark {
		return
	}
	s.known = true
	s.size, s.mtime, s.ctime = int64(st.Size), st.Mtime, st.Ctime
}

// endWith is end with the attributes of an open descriptor. Of changes beside each other the last one asks for them: until then
// nothing can be said anyway, and what one asked for before another ended would not be what that left.
func (s *signature) endWith(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.inFlight == 1 {
		mark := s.changes
		s.mu.Unlock()
		var st unix.Stat_t
		err := unix.Fstat(fd, &st)
		s.mu.Lock()
		if s.changes == mark {
			s.known = err == nil
			s.size, s.mtime, s.ctime = st.Size, statxTime(st.Mtim), statxTime(st.Ctim)
			break
		}
		// Another began, and may have ended without asking.
	}
	s.inFlight--
}

func statxTime(t unix.Timespec) unix.StatxTimestamp {
	return unix.StatxTimestamp{Sec: t.Sec, Nsec: uint32(t.Nsec)}
}

// touch is a change of a file's metadata in progress.
type touch struct {
	content *content
}

// beginTouch is called before a request changes metadata of n, so that the new ctime is not taken for somebody else's
// doing. It costs nothing for nodes that were never opened.
func (fs *fileSystem) beginTouch(n *node) touch {
	if n == nil {
		return touch{}
	}
	c := n.data.Load()
	if c != nil {
		c.signature.begin()
	}
	return touch{c}
}

// end takes the attributes after the change, or nil if they are not known.
func (t touch) end(st *unix.Statx_t) {
	if t.content == nil {
		return
	}
	// The File first: until it knows, the change has to count as under way.
	if f := t.content.live(); f != nil {
		f.HomeTouched()
	}
	if st == nil {
		t.content.signature.end(false, 0, unix.StatxTimestamp{}, unix.StatxTimestamp{})
	} else {
		t.content.signature.end(true, int64(st.Size), st.Mtime, st.Ctime)
	}
}

// endWith is end with the attributes that the descriptor of the node gives.
func (t touch) endWith(fd int) {
	if t.content == nil {
		return
	}
	var st unix.Statx_t
	if statx(fd, "", &st) != nil {
		t.end(nil)
		return
	}
	t.end(&st)
}
