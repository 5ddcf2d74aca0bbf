package fs

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A file without a name and without an open gives its blocks back when nobody has it any more, and nobody includes this
// process: a descriptor of the node, and what the page cache has of the file. The kernel says soon that it has
// forgotten the file. Until then a program may open it, which looked the name up before it went. So what is kept goes
// earlier only where space is needed.

// maxRemoved is the most files without name and open that are kept.
const maxRemoved = 256

// removedFiles are those that lost their names through the mount and that nobody has open, until they are let go of.
// Some may be forgotten already.
type removedFiles struct {
	mu    sync.Mutex
	nodes map[*node]struct{} // protected by mu

	// leaving counts those that are being let go of right now, which may take a while, and left those that have been.
	leaving atomic.Int32
	left    atomic.Uint64
}

// leave is called before files without a name may give their space back, and stay after that.
func (r *removedFiles) leave() { r.leaving.Add(1) }

func (r *removedFiles) stay(some bool) {
	if some {
		r.left.Add(1)
	}
	r.leaving.Add(-1)
}

// keepRemoved remembers n, which has neither name nor open.
func (fs *fileSystem) keepRemoved(n *node) {
	r := &fs.removed
	r.mu.Lock()
	if r.nodes == nil {
		r.nodes = make(map[*node]struct{})
	}
	r.nodes[n] = struct{}{}
	full := len(r.nodes) > maxRemoved
	r.mu.Unlock()
	if full {
		fs.letGoRemoved()
	}
}

// letGoRemoved gives up what is kept of removed files. any reports whether that was something, busy whether a request
// is using one of them right now.
func (fs *fileSystem) letGoRemoved() (any, busy bool) {
	r := &fs.removed
	r.mu.Lock()
	nodes := r.nodes
	r.nodes = nil
	if len(nodes) > 0 { // before anybody finds that there are none
		r.leave()
		defer func() { r.stay(any) }()
	}
	r.mu.Unlock()
	for n := range nodes {
		if fs.letGo(n, true) {
			any = true
			continue
		}
		n.mu.Lock()
		used := !n.dropped && n.users > 0
		n.mu.Unlock()
		if used {
			busy = true
			r.mu.Lock()
			if r.nodes == nil {
				r.nodes = make(map[*node]struct{})
			}
			r.nodes[n] = struct{}{}
			r.mu.Unlock()
		}
	}
	return any, busy
}

// letGo gives up what is kept of a file that has neither name nor open. gone says that it lost its last name through
// the mount. It reports whether that was anything. It asks no server, which may hang: of a filesystem that has one, the
// number of names is the one that the kernel knows, and a file that another machine removed is kept until somebody asks
// for its attributes.
func (fs *fileSystem) letGo(n *node, gone bool) bool {
	if !n.isRegular() || n.opens() > 0 {
		return false
	}
	n.mu.Lock()
	if n.dropped || n.users > 0 || n.where.parent != nil && gone || (n.fd < 0 || n.removed) && !gone {
		n.mu.Unlock()
		return false
	}
	if n.fd >= 0 {
		var st unix.Statx_t
		if peek(n.fd, "", &st) != nil || st.Nlink > 0 {
			n.mu.Unlock()
			return false
		}
		unix.Close(n.fd)
		n.fd = -1
		fs.descriptors.remove(n)
	}
	n.mu.Unlock()
	if fs.cache != nil {
		fs.cache.Forget(n.key.fileID())
	}
	return true
}

// isRemoved reports whether n lost its last name through the mount.
func (n *node) isRemoved() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.removed
}

// opens returns how many opens n has.
func (n *node) opens() int32 {
	if c := n.data.Load(); c != nil {
		return c.opens.Load()
	}
	return 0
}

// lastNameGone is called when n lost its last name through the mount.
func (fs *fileSystem) lastNameGone(n *node) {
	n.mu.Lock()
	n.removed = true
	n.mu.Unlock()
	if n.opens() > 0 {
		fs.unlinked.Add(1)
		n.content().unlinked.Store(true)
		if n.opens() > 0 {
			return
		}
		fs.lastOpenGone(n)
		return
	}
	fs.keepRemoved(n)
}

// lastOpenGone is called when n lost its last open.
func (fs *fileSystem) lastOpenGone(n *node) {
	if !n.content().unlinked.Swap(false) {
		fs.letGo(n, false)
		return
	}
	fs.keepRemoved(n)
	fs.unlinked.Add(-1)
	select {
	case fs.freed <- struct{}{}:
	default:
	}
}

// spacePatience is how many rounds a request without space waits for a file without a name to be closed. The kernel
// does not wait for the daemon when it closes a file, so a program may have closed it before. A round is no fixed time,
// for the reason that patienceRound has none.
const spacePatience = 50

// spend is creator.spend that tries again while files that were removed may give space back.
func (fs *fileSystem) spend(uid uint32, call func() error) error {
	for round := 0; ; {
		// before call: what goes after it says so in freed
		waits, left := fs.unlinked.Load() > 0, fs.removed.left.Load()
		err := fs.creator.spend(uid, call)
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			return err
		}
		any, busy := fs.letGoRemoved()
		if any {
			continue
		}
		leaving := fs.removed.leaving.Load() > 0 // in this order: who is through by now has said so in left
		went := fs.removed.left.Load() != left
		if !waits && !busy && !leaving && !went || round == spacePatience {
			return err
		}
		if round++; went {
			continue
		}
		select {
		case <-fs.freed:
		case <-time.After(patienceRound):
		}
	}
}

// reapInterval is how often files are looked for that were removed in SOURCE, and reapAtOnce how many are looked at
// then.
const (
	reapInterval = time.Second
	reapAtOnce   = 4096
)

// reap lets go of files that were removed in SOURCE until ctx ends.
func (fs *fileSystem) reap(ctx context.Context) {
	tick := time.NewTicker(reapInterval)
	defer tick.Stop()
	for from := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var nodes []*node
		nodes, from = fs.descriptors.some(from, reapAtOnce)
		for _, n := range nodes {
			fs.letGo(n, false)
		}
	}
}

// some returns up to most nodes with a descriptor from a place in the ring on, and the place after them.
func (d *descriptors) some(from, most int) ([]*node, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if from >= len(d.ring) {
		from = 0
	}
	nodes := append([]*node(nil), d.ring[from:min(len(d.ring), from+most)]...)
	return nodes, from + len(nodes)
}

// Removed implements pagecache.RemovableHome.
func (h *home) Removed() bool {
	if n := h.fs.table.byInode(h.key); n != nil && n.opens() > 0 {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(h.fd, &st) == nil && st.Nlink == 0
}
