package fs

import (
	"context"
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A file without a name and without an open gives its blocks back when nobody has it any more, and nobody includes this process:
// a descriptor of the node, and what the page cache has of the file. The kernel says that it forgot the file some time later, and
// a full disk may not have that time. So both go with the last open, or with the last name.

// letGo gives up what is kept of a file that has neither name nor open. gone says that it is known to have no name in SOURCE
// either.
func (fs *fileSystem) letGo(n *node, gone bool) {
	if !n.isRegular() || n.opens() > 0 {
		return
	}
	n.mu.Lock()
	if n.dropped || n.users > 0 || n.fd < 0 && !gone {
		n.mu.Unlock()
		return
	}
	if n.fd >= 0 {
		var st unix.Statx_t
		if statx(n.fd, "", &st) != nil || st.Nlink > 0 {
			n.mu.Unlock()
			return
		}
		unix.Close(n.fd)
		n.fd = -1
		fs.descriptors.remove(n)
	}
	n.mu.Unlock()
	if fs.cache != nil {
		fs.cache.Forget(n.key.fileID())
	}
}

// opens returns how many opens n has.
func (n *node) opens() int32 {
	if c := n.data.Load(); c != nil {
		return c.opens.Load()
	}
	return 0
}

// lastNameGone is called when n lost its last name.
func (fs *fileSystem) lastNameGone(n *node) {
	if n.opens() > 0 {
		fs.unlinked.Add(1)
		n.content().unlinked.Store(true)
		if n.opens() > 0 {
			return
		}
		fs.lastOpenGone(n)
	}
	fs.letGo(n, true)
}

// lastOpenGone is called when n lost its last open.
func (fs *fileSystem) lastOpenGone(n *node) {
	unlinked := n.content().unlinked.Swap(false)
	fs.letGo(n, unlinked)
	if unlinked {
		fs.unlinked.Add(-1)
		select {
		case fs.freed <- struct{}{}:
		default:
		}
	}
}

// spacePatience is how long a request without space waits for a file without a name to be closed. The kernel does not wait for the
// daemon when it closes a file, so a program may have closed it before.
const spacePatience = 20 * time.Millisecond

// spend is creator.spend that tries again while files that were removed may give space back.
func (fs *fileSystem) spend(uid uint32, call func() error) error {
	for {
		waits := fs.unlinked.Load() > 0 // before call: what goes after it says so in freed
		err := fs.creator.spend(uid, call)
		if !waits || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			return err
		}
		select {
		case <-fs.freed:
		case <-time.After(spacePatience):
			return err
		}
	}
}

// reapInterval is how often files are looked for that were removed in SOURCE, and reapAtOnce how many are looked at then.
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
