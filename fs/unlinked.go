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

// A file without a name and without an open gives its blocks back when its last descriptor is closed. The daemon itself
// may have some: of the node, and in the page cache. The kernel soon reports that it has forgotten the file. Until
// then, a program that looked the name up before it went may still open the file. So the daemon gives its descriptors
// up earlier only if space is needed.

// maxRemoved is how many files without name and open are kept.
const maxRemoved = 256

// removedFiles are the files that lost their names through the mount and that no program has open, until they are let
// go. The kernel may have forgotten some of them.
type removedFiles struct {
	mu    sync.Mutex
	nodes map[*node]struct{} // protected by mu

	// leaving counts the goroutines that are letting files go, which may take a while.
	// left counts how often files went.
	leaving atomic.Int32
	left    atomic.Uint64
}

// leave is called before files without a name may give their space back, stay after it.
func (r *removedFiles) leave() { r.leaving.Add(1) }

func (r *removedFiles) stay(some bool) {
	if some {
		r.left.Add(1)
	}
	r.leaving.Add(-1)
}

// keepRemoved remembers n, which has neither a name nor an open.
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

// letGoRemoved lets all removed files go. any reports whether that freed anything, busy whether a request is using one
// of them.
func (fs *fileSystem) letGoRemoved() (any, busy bool) {
	r := &fs.removed
	r.mu.Lock()
	nodes := r.nodes
	r.nodes = nil
	if len(nodes) > 0 { // before other goroutines find none
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

// letGo gives up the daemon's descriptors of a file that has neither a name nor an open, and reports whether there were
// any. gone says that it lost its last name through the mount. letGo asks no server, which may hang. On a filesystem
// with a server, it uses the link count that the kernel has cached. So a file that another machine removed is kept
// until a program asks for its attributes.
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

// opens returns the number of opens of n.
func (n *node) opens() int32 {
	if c := n.data.Load(); c != nil {
		return c.opens.Load()
	}
	return 0
}

// lastNameGone is called after n lost its last name through the mount.
//
// If the daemon does not see opens, programs may have n open until the kernel forgets it.
func (fs *fileSystem) lastNameGone(n *node) {
	n.mu.Lock()
	before := n.removed
	n.removed = true
	n.mu.Unlock()
	if fs.unseenOpens {
		if !before {
			fs.unlinked.Add(1)
		}
		return
	}
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

// lastOpenGone is called after n lost its last open.
func (fs *fileSystem) lastOpenGone(n *node) {
	if !n.content().unlinked.Swap(false) {
		fs.letGo(n, false)
		return
	}
	fs.keepRemoved(n)
	fs.noteFreed()
}

// noteFreed is called when a file without a name is not open any more.
func (fs *fileSystem) noteFreed() {
	fs.unlinked.Add(-1)
	select {
	case fs.freed <- struct{}{}:
	default:
	}
}

// spacePatience is how many rounds a request without space waits for the close of a file without a name. The kernel
// does not wait for the daemon when it closes a file, so a program may have closed the file already. A round is not a
// fixed time, see patienceRound.
const spacePatience = 50

// spend is creator.spend, but tries again while removed files may give space back.
func (fs *fileSystem) spend(uid uint32, call func() error) error {
	for round := 0; ; {
		// read before call, so that a later close is seen through freed
		waits, left := fs.unlinked.Load() > 0, fs.removed.left.Load()
		err := fs.creator.spend(uid, call)
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			return err
		}
		any, busy := fs.letGoRemoved()
		if any {
			continue
		}
		leaving := fs.removed.leaving.Load() > 0 // in this order: one that is done has raised left
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

// reapInterval is the interval at which the daemon looks for files that were removed in SOURCE. It looks at reapAtOnce
// files each time.
const (
	reapInterval = time.Second
	reapAtOnce   = 4096
)

// reap lets files go that were removed directly in SOURCE, until ctx ends.
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

// some returns up to most nodes with a descriptor, beginning at a place in the ring, and the place after them.
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
	if n := h.fs.table.byInode(h.key); n != nil && (h.fs.unseenOpens || n.opens() > 0) {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(h.fd, &st) == nil && st.Nlink == 0
}
