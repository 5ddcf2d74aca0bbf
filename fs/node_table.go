package fs

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const shardCount = 64

// index maps numbers to things, many of which are looked up at once.
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

// take removes and returns what id stands for.
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

// nodeTable has the nodes, by number and by inode. A node stays while the kernel refers to it or another node's locator
// names it; so a directory that the kernel forgot and looks up again is still the one that its children are found by.
type nodeTable struct {
	byID   index[*node]
	lastID atomic.Uint64

	shards [shardCount]struct {
		sync.Mutex
		byKey map[inodeKey]*node
	}
}

type keyShard = struct {
	sync.Mutex
	byKey map[inodeKey]*node
}

func (t *nodeTable) shard(k inodeKey) *keyShard { return &t.shards[(k.ino^k.dev)%shardCount] }

// find returns the node of the inode that st describes, or nil.
func (t *nodeTable) find(who identity) *node {
	s := t.shard(who.key)
	s.Lock()
	defer s.Unlock()
	if n := s.byKey[who.key]; n != nil && n.is(who) {
		return n
	}
	return nil
}

// byInode returns the node of the inode k, or nil.
func (t *nodeTable) byInode(k inodeKey) *node {
	s := t.shard(k)
	s.Lock()
	defer s.Unlock()
	return s.byKey[k]
}

// refer returns the node of who with one more reference by the kernel. If there is none it makes one and calls made
// with it before anybody else can find it; made takes no lock of this package.
func (t *nodeTable) refer(who identity, made func(*node)) *node {
	s := t.shard(who.key)
	s.Lock()
	defer s.Unlock()
	n := s.byKey[who.key]
	if n == nil || !n.is(who) {
		// A node with the same number but another birth is of an inode that was removed underneath. It stays in
		// byID until the kernel forgets it, and answers ESTALE.
		n = &node{id: nodeID(t.lastID.Add(1)), identity: who, fd: -1, slot: -1}
		made(n)
		if s.byKey == nil {
			s.byKey = make(map[inodeKey]*node)
		}
		s.byKey[who.key] = n
		t.byID.put(uint64(n.id), n)
	}
	n.lookups++
	return n
}

// adjust changes the references to n and reports whether none is left, in which case n is out of the table.
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
	}
	return true
}

// register notes that the kernel learnt of what st describes as name in parent, and returns its node.
func (fs *fileSystem) register(parent *node, name string, st *unix.Statx_t) *node {
	n := fs.table.refer(identify(st), fs.joinCache)
	if parent != nil {
		fs.place(n, locator{parent, name})
	}
	return n
}

// joinCache gives a new node what devices hold of its file, before any request can go past it.
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
		w = new(witness) // f is about to let go of the file
	}
	c := newContent(w)
	c.attach(f)
	n.data.Store(c)
}

// place sets n's locator. Where it takes one away that others may be using, the caller holds that directory's names.
func (fs *fileSystem) place(n *node, where locator) {
	if n.id == rootID {
		return
	}
	n.mu.Lock()
	old := n.where
	if n.dropped || old == where {
		n.mu.Unlock()
		return
	}
	if where.parent != nil {
		fs.table.adjust(where.parent, 0, +1)
	}
	n.where = where
	if n.below && n.fd >= 0 {
		fs.descriptors.addBelow(n)
	}
	n.mu.Unlock()
	if old.parent != nil {
		fs.unrefer(old.parent, 0, -1)
	}
}

// unrefer takes references from n and drops it, and what only it referred to, when none is left.
func (fs *fileSystem) unrefer(n *node, lookups uint64, kids int) {
	for n != nil && fs.table.adjust(n, lookups, kids) {
		parent := fs.drop(n)
		n, lookups, kids = parent, 0, -1
	}
}

// drop ends a node that is out of the table and returns the node that its locator named.
func (fs *fileSystem) drop(n *node) (parent *node) {
	if n.isRemoved() {
		fs.removed.leave()
		defer fs.removed.stay(true)
	}
	fs.leaveCache(n)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropped = true
	fs.closeUnusedLocked(n)
	parent = n.where.parent
	n.where = locator{}
	return parent
}

// leaveCache tells the page cache when the last name of a file went before its last reference did.
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
