package fs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// parting is a name that is about to stop leading to a node. The node's locator stays as it was until the name is gone:
// a request that wants to use the locator waits for the directory's names and then looks again.
type parting struct {
	fs    *fileSystem
	node  *node // nil if the kernel knows no node by that name
	name  locator
	fd    int  // the node's descriptor, held, or -1
	last  bool // it is the only name of a regular file
	touch touch
}

// part prepares the removal of name from parent. With pin, a node that could not be found otherwise gets a descriptor
// to keep. The caller holds parent.names locked; dir is the descriptor of parent. It returns ENOENT if there is no such
// name.
func (fs *fileSystem) part(parent *node, dir int, name string, pin bool) (parting, syscall.Errno) {
	p := parting{fs: fs, name: locator{parent, name}, fd: -1}
	var st unix.Statx_t
	switch foreign, err := fs.statxIn(parent, dir, name, &st); {
	case err != nil:
		return p, toErrno(err)
	case foreign:
		return p, syscall.EBUSY // a mountpoint cannot be removed
	}
	n := fs.table.find(identify(&st))
	if n == nil {
		return p, 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dropped {
		return p, 0
	}
	p.last = st.Nlink == 1 && n.isRegular()
	if n.fd < 0 && pin && n.where == p.name {
		fd, errno := fs.openVerified(n, dir, name, unix.O_PATH)
		if errno != 0 {
			return p, errno
		}
		fs.adoptLocked(n, fd)
	}
	if n.fd >= 0 {
		n.users++
		p.fd = n.fd
	}
	p.node = n
	if p.fd >= 0 {
		p.touch = beginTouch(n, p.fd) // asks again: a write may have ended since st was filled
	} else {
		p.touch = beginTouchWith(n, &st)
	}
	return p, 0
}

// leave notes that the name is gone and that the node is now at where, if anywhere.
func (p *parting) leave(where locator) {
	if p.node == nil {
		return
	}
	p.node.mu.Lock()
	here := p.node.where == p.name
	p.node.mu.Unlock()
	if here || where.parent != nil {
		p.fs.place(p.node, where)
	}
}

// end gives back what part took, after leave or because the name stayed. dir and name locate the node if it has no
// descriptor.
func (p *parting) end(dir int, name string) {
	if p.node == nil {
		return
	}
	if p.fd >= 0 {
		p.touch.endWith(p.fd)
		p.fs.unhold(p.node)
		return
	}
	if p.touch.witness == nil {
		return
	}
	var st unix.Statx_t
	if statx(dir, name, &st) == nil && p.node.is(identify(&st)) {
		p.touch.end(&st)
	} else {
		p.touch.end(nil)
	}
}

// Unlink implements fuse.RawFileSystem.
func (fs *fileSystem) Unlink(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	return fs.remove(header.NodeId, name, 0)
}

// Rmdir implements fuse.RawFileSystem.
func (fs *fileSystem) Rmdir(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	return fs.remove(header.NodeId, name, unix.AT_REMOVEDIR)
}

func (fs *fileSystem) remove(parentID uint64, name string, flags int) fuse.Status {
	parent, dir, errno := fs.directory(parentID, name)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(parent)
	defer fs.descriptors.trim()
	parent.names.Lock()
	defer parent.names.Unlock()
	p, errno := fs.part(parent, dir, name, true)
	if errno != 0 {
		return fuse.Status(errno)
	}
	err := retry(func() error { return unix.Unlinkat(dir, name, flags) })
	if err == nil {
		p.leave(locator{})
	}
	if err == nil && p.last && p.node != nil {
		// The file cannot be opened by name again, so its attributes need not be known.
		p.touch.end(nil)
		p.touch = touch{}
	}
	p.end(dir, name)
	if err == nil && p.last {
		fs.lastNameGone(p.node)
	}
	return toStatus(err)
}

// Rename implements fuse.RawFileSystem.
func (fs *fileSystem) Rename(_ <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	from, fromDir, errno := fs.directory(in.NodeId, oldName)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(from)
	to, toDir, errno := fs.directory(in.Newdir, newName)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(to)
	defer fs.descriptors.trim()
	var moved [2]*node
	if from != to {
		defer func() { // when the names are unlocked: what moved may inherit another pin now
			for _, n := range moved {
				fs.repin(n)
			}
		}()
	}
	if from != to && !sameMount(fromDir, toDir) {
		return fuse.Status(syscall.EXDEV) // before anything waits for the other filesystem with both names locked
	}
	defer lockNames(from, to)()

	source, errno := fs.part(from, fromDir, oldName, false)
	if errno != 0 {
		return fuse.Status(errno)
	}
	exchange := in.Flags&unix.RENAME_EXCHANGE != 0
	target, errno := fs.part(to, toDir, newName, !exchange)
	if errno != 0 && errno != syscall.ENOENT {
		source.end(fromDir, oldName)
		return fuse.Status(errno)
	}
	call := func() error { return unix.Renameat2(fromDir, oldName, toDir, newName, uint(in.Flags)) }
	var err error
	if in.Flags&unix.RENAME_WHITEOUT != 0 {
		err = fs.creator.as(&in.Caller, call) // it makes an inode
	} else {
		err = fs.spend(in.Caller.Uid, func() error { return retry(call) }) // the new name may take a block
	}
	// rename(2) leaves two names of one inode as they are.
	if err != nil || source.node != nil && source.node == target.node {
		source.end(fromDir, oldName)
		target.end(toDir, newName)
		return toStatus(err)
	}
	if exchange {
		target.leave(locator{from, oldName})
	} else {
		target.leave(locator{})
	}
	source.leave(locator{to, newName})
	target.end(fromDir, oldName)
	if target.last && !exchange {
		fs.lastNameGone(target.node)
	}
	source.end(toDir, newName)
	moved = [2]*node{source.node, target.node}
	return fuse.OK
}

// sameMount reports whether two descriptors are on one mount: rename and link do not work across mounts. If the kernel
// does not say (before Linux 5.8), it returns true, and the kernel refuses by itself.
func sameMount(a, b int) bool {
	var first, second unix.Statx_t
	if peek(a, "", &first) != nil || peek(b, "", &second) != nil {
		return true
	}
	return first.Mnt_id == second.Mnt_id
}

// lockNames locks the names of two directories, which may be the same, and returns the function that unlocks them.
func lockNames(a, b *node) func() {
	if a == b {
		a.names.Lock()
		return a.names.Unlock
	}
	if a.id > b.id {
		a, b = b, a
	}
	a.names.Lock()
	b.names.Lock()
	return func() {
		b.names.Unlock()
		a.names.Unlock()
	}
}
