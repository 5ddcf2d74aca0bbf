// Package fs shows a directory at a mountpoint: it translates FUSE requests into operations on the files of SOURCE and
// asks package pagecache wherever a device may hold something newer. It is the only importer of go-fuse.
//
// # Model
//
// Home is SOURCE as buffered I/O sees it. Every inode that the kernel knows has a node, found by its number or by
// (st_dev, st_ino), so that hard links are one node. A node is reached by descriptor, never by a path made of strings,
// so paths of any length work. Its O_PATH descriptor is opened when first needed, from the node's locator (a directory
// node and a name in it), checked against the node's identity, and closed again when many are open. On a filesystem
// that is mounted below SOURCE it is closed soon after use, so that the filesystem can be unmounted (below.go). A node
// whose last known name goes away through the mount keeps a descriptor. When somebody changes SOURCE underneath so that
// a locator no longer fits, a program's open of the node gives it a descriptor; without one, and for an open by name,
// the answer is ESTALE and the kernel looks the path up again.
//
// Permission checks are the kernel's (default_permissions and POSIX ACLs). What the kernel cannot do is done here: new
// files get the caller's owner and group and the mode that umask or a default ACL gives in one backing call
// (credentials.go), set-id bits are cleared where the kernel asks for it, calls that take space are made with the
// caller's right to space (credentials.go), and what mounts below SOURCE forbid is not shown (strict.go).
//
// Regular files that no device has anything to do with never touch package pagecache: that is the common path. Once a
// File is attached to a node, every request that reads or changes the bytes goes through it.
//
// Where no device can have anything to do with what is written, the kernel reads, writes and maps the backing files
// itself (passthrough.go), and none of this is asked.
//
// A read-only mount may let the kernel open files without asking (kernel_opens.go). Then, and where it was asked for,
// tree.go reports changes in SOURCE.
//
// Where programs read small files one after the other, the host reads the next ones ahead (ahead.go).
//
// The kernel caches pages across opens and is told explicitly what to drop: at an open that finds SOURCE changed
// (witness.go) and when package pagecache says so. kernel_pages.go has the rule that keeps a reader from getting old
// bytes for good when an invalidation meets a write in flight.
//
// # Locks, in the order they are taken
//
//	fileSystem.touching read-locked while the daemon makes requests of its own mount; no other lock is held then
//	node.names         of a directory: read-locked while a name in it is resolved, locked while one goes away or
//	                   moves; of two directories, the one with the lower node number first
//	content.telling    one request at a time tells the kernel of a new size (longer.go)
//	openFile.mu        locked while the open is closed; nobody else waits for it (openFile.use)
//	content.gate       read-locked around every change of home
//	openDir.mu         the position and buffer of an open directory
//	node.mu            descriptor and locator
//	nodeTable shards   lookup counts and the two indexes
//	descriptors.mu     the ring of open descriptors; taken under node.mu, and only ever tries a node.mu itself
//	events.reading     held while events are read
//	events.mu          what is watched; no system call is made under it
//	witness.mu, witnesses.mu, hazard.mu, passthrough.mu, holds.mu, ahead.mu: leaves
//
// Nobody holds the names of a directory, or node.mu, while asking the server of a filesystem that is mounted in that
// directory: the server may hang. LOOKUP and READDIRPLUS, for which the kernel locks the directory too, answer with
// what the kernel knows of the other filesystem's root (statxIn); GETATTR and OPEN take a descriptor under the lock and
// use it afterwards. What is left: a directory of the hung filesystem itself waits for a name in it that is being
// looked up.
//
// No lock is held while the kernel is told to drop pages, since it may wait for a page that a read request has locked.
// The exceptions are content.telling and a read-locked openFile.mu: no request waits for them while it has
// content.gate, or while a page is locked for it.
//
// # Processes
//
// A mount has a guard (guard.go), a process that ends the kernel's connection where a killed daemon cannot die:
// otherwise every program that uses the mount could hang. Programs that mount call Guard first thing.
//
// # Ownership
//
// A node's descriptor belongs to the node; hold and unhold bracket its use. An openFile and an openDir own theirs until
// RELEASE. A Home (pagecache.Home) owns its own and outlives node and handle.
//
// # What it does not do
//
// It does not lock files: the kernel keeps fcntl and flock locks itself, since all users of the mount are on one
// machine. It forwards no ioctl but those of inode flags. It decides nothing about coherence.
package fs
