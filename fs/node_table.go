package fs

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const shardCount = 64

// index maps numbers to values. Its shards let many goroutines look values up at once.
type index[T any] struct {
	shards [shardCount]struct {
		sync.RWMutex
		m map[uint64]T
	}
}

func (x *index[T]) get(id uint64) T {
	s := &x.shards[id%shardCount]
	s.RLock()
	v := s.m[id]
	s.RUnlock()
	return v
}

func (x *index[T]) put(id uint64, v T) {
	s := &x.shards[id%shardCount]
	s.Lock()
	if s.m == nil {
		s.m = make(map[uint64]T)
	}
	s.m[id] = v
	s.Unlock()
}

// take removes and returns the value of id.
func (x *index[T]) take(id uint64) (T, bool) {
	s := &x.shards[id%shardCount]
	s.Lock()
	v, ok := s.m[id]
	delete(s.m, id)
	s.Unlock()
	return v, ok
}

// all returns everything in the index.
func (x *index[T]) all() []T {
	var vs []T
	for i := range x.shards {
		s := &x.shards[i]
		s.RLock()
		for _, v := range s.m {
			vs = append(vs, v)
		}
		s.RUnlock()
	}
	return vs
}

// nodeTable has the nodes, by number and by inode. A node stays while the kernel refers to it, or while a locator names
// it. So if the kernel forgets a directory and looks it up again, it is still the node by which its children are found.
type nodeTable struct {
	byID   index[*node]
	lastID atomic.Uint64
	// placing is held while the locator of a directory changes, so that no directory is ever found below itself.
	placing sync.Mutex

	shards [shardCount]keyShard
}

type keyShard struct {
	sync.Mutex
	byKey map[inodeKey]*node // protected by Mutex
	// former counts the nodes of removed inodes that the kernel has not forgotten and whose number another node of
	// byKey had since. Protected by Mutex.
	former map[inodeKey]int
}

func (t *nodeTable) shard(k inodeKey) *keyShard { return &t.shards[(k.ino^k.dev)%shardCount] }

// find returns the node of the inode who, or nil.
func (t *nodeTable) find(who identity) *node {
	s := t.shard(who.key)
	s.Lock()
	defer s.Unlock()
	if n := s.byKey[who.key]; n != nil && n.is(who) {
		return n
	}
	return nil
}

// byInode returns the node with the inode number k, or nil.
func (t *nodeTable) byInode(k inodeKey) *node {
	s := t.shard(k)
	s.Lock()
	defer s.Unlock()
	return s.byKey[k]
}

// refer returns the node of who, with one more reference by the kernel. If there is none, it makes one, and calls made
// with it before other goroutines can find it. made must take no lock of this package.
func (t *nodeTable) refer(who identity, made func(*node)) *node {
	s := t.shard(who.key)
	s.Lock()
	defer s.Unlock()
	n := s.byKey[who.key]
	if n == nil || !n.is(who) {
		// A node with this number but another birth is of an inode that was removed directly in SOURCE. It stays in
		// byID, and answers ESTALE, until the kernel forgets it.
		n = &node{id: nodeID(t.lastID.Add(1)), identity: who, fd: -1, slot: -1}
		n.told.Store(neverTold)
		made(n)
		if s.byKey == nil {
			s.byKey, s.former = make(map[inodeKey]*node), make(map[inodeKey]int)
		}
		if s.byKey[who.key] != nil {
			s.former[who.key]++
		}
		s.byKey[who.key] = n
		t.byID.put(uint64(n.id), n)
	}
	n.lookups++
	return n
}

// adjust changes the references to n. If none is left, it takes n out of the table and returns true.
func (t *nodeTable) adjust(n *node, lookups uint64, kids int) (gone bool) {
	s := t.shard(n.key)
	s.Lock()
	defer s.Unlock()
	n.lookups -= min(lookups, n.lookups)
	n.kids += kids
	if n.lookups > 0 || n.kids > 0 || n.id == rootID {
		return false
	}
	t.byID.take(uint64(n.id))
	if s.byKey[n.key] == n {
		delete(s.byKey, n.key)
	} else if s.former[n.key]--; s.former[n.key] == 0 {
		delete(s.former, n.key)
	}
	return true
}

// shared reports whether the kernel may know several inodes by the number k.
func (t *nodeTable) shared(k inodeKey) bool {
	s := t.shard(k)
	s.Lock()
	defer s.Unlock()
	return s.former[k] > 0
}

// register notes that the kernel looked up the inode that st describes as name in parent, and returns its node.
func (fs *fileSystem) register(parent *node, name string, st *unix.Statx_t) *node {
	n := fs.table.refer(identify(st), fs.joinCache)
	if parent != nil {
		fs.place(n, locator{parent, name})
	}
	return n
}

// joinCache attaches the File of the page cache, if there is one, to a new node, before any request can bypass it.
func (fs *fileSystem) joinCache(n *node) {
	if fs.cache == nil || !n.isRegular() {
		return
	}
	f := fs.cache.Lookup(n.key.fileID())
	if f == nil {
		return
	}
	w := fs.witnesses.get(n.key)
	if w == nil {
		w = new(witness) // f is about to be detached
	}
	c := newContent(w)
	c.attach(f)
	n.data.Store(c)
}

// place sets n's locator. If others may be using the old locator, the caller holds the names of its directory.
// If a directory appears below itself, place does nothing: the directory was mounted there, or moved in SOURCE into a
// directory that was below it. The kernel does not accept it there either (ELOOP).
func (fs *fileSystem) place(n *node, where locator) {
	if n.id == rootID {
		return
	}
	n.mu.Lock()
	old := n.where
	if n.dropped || old == where || !fs.table.move(n, where) {
		n.mu.Unlock()
		return
	}
	if n.below && n.fd >= 0 {
		fs.descriptors.addBelow(n)
	}
	n.mu.Unlock()
	if old.parent != nil {
		fs.unrefer(old.parent, 0, -1)
	}
}

// move moves the locator of n to where, and reports whether it did. The caller holds n.mu.
func (t *nodeTable) move(n *node, where locator) bool {
	if n.kind == unix.S_IFDIR {
		t.placing.Lock()
		defer t.placing.Unlock()
		parent := n == where.parent || t.isParent(n) // a new one is not, however deep it is
		for above := where.parent; parent && above != nil; above = above.where.parent {
			if above == n {
				return false
			}
		}
	}
	if where.parent != nil {
		t.adjust(where.parent, 0, +1)
	}
	n.where = where
	return true
}

// isParent reports whether locators name n.
func (t *nodeTable) isParent(n *node) bool {
	s := t.shard(n.key)
	s.Lock()
	defer s.Unlock()
	return n.kids > 0
}

// unrefer takes references from n. If none is left, it drops n, and then its ancestors that are not referred to either.
func (fs *fileSystem) unrefer(n *node, lookups uint64, kids int) {
	for n != nil && fs.table.adjust(n, lookups, kids) {
		parent := fs.drop(n)
		n, lookups, kids = parent, 0, -1
	}
}

// drop ends a node that is out of the table. It returns the parent in the node's locator.
func (fs *fileSystem) drop(n *node) (parent *node) {
	if n.isRemoved() {
		fs.removed.leave()
		defer fs.removed.stay(true)
	}
	fs.leaveCache(n)
	if fs.unseenOpens {
		fs.kept.forget(n)
		if n.isRemoved() {
			defer fs.noteFreed()
		}
		defer fs.late.forget(n) // when n is dropped
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropped = true
	fs.closeUnusedLocked(n)
	parent = n.where.parent
	fs.table.move(n, locator{})
	return parent
}

// leaveCache tells the page cache to forget a file that lost its last name before its last reference.
func (fs *fileSystem) leaveCache(n *node) {
	if fs.cache == nil || n.kind != unix.S_IFREG || fs.cache.Lookup(n.key.fileID()) == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fd < 0 {
		return
	}
	var st unix.Statx_t
	if peek(n.fd, "", &st) == nil && st.Nlink == 0 {
		fs.cache.Forget(n.key.fileID())
	}
}
