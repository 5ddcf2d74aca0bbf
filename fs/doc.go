// Package fs shows a directory at a mountpoint. It translates FUSE requests into operations on the files of SOURCE. It
// asks package pagecache when a device may hold newer bytes. No other package imports go-fuse.
//
// # Model
//
// Home is SOURCE as buffered I/O sees it. Every inode that the kernel knows has a node. Nodes are found by their number
// or by (st_dev, st_ino), so all hard links of a file are one node. A node is reached by descriptor, never by a path
// string, so paths of any length work.
//
// The O_PATH descriptor of a node is opened on first use from the node's locator: a directory node and a name in it.
// The descriptor is checked against the node's identity. It is closed again when too many are open. On a filesystem
// mounted below SOURCE it is closed soon after use, so that the filesystem can be unmounted (below.go). A node that
// loses its last known name through the mount keeps a descriptor.
//
// A change made directly in SOURCE can invalidate a locator. Then the node gets a descriptor from a program's open of
// the file. If no program has it open, or the request is an open by name, the answer is ESTALE, and the kernel looks
// the path up again.
//
// The kernel checks permissions (default_permissions and POSIX ACLs). This package does what the kernel cannot:
//
//   - New files get the caller's owner and group, and the mode that the umask or a default ACL gives, in one backing
//     call
//     (credentials.go).
//   - Set-id bits are cleared when the kernel asks for it.
//   - Calls that take space run with the caller's right to space (credentials.go).
//   - What mounts below SOURCE forbid is not shown (strict.go).
//
// Regular files that no device uses never touch package pagecache. That is the common path. Once a File is attached to
// a node, every request that reads or changes bytes goes through it.
//
// If no device can use written bytes, the kernel reads, writes and maps the backing files itself (passthrough.go),
// without the daemon.
//
// A mount may let the kernel open files without asking (kernel_opens.go). If programs may write there, files are found
// by their handles (handles.go), and programs show their descriptors before devices may map their files (showing.go).
// Then, or on request, tree.go reports changes in SOURCE.
//
// When programs read small files one after the other, the host reads the next files ahead (ahead.go).
//
// The kernel caches pages across opens. The daemon tells it explicitly what to drop: when an open finds that SOURCE has
// changed (witness.go), and when package pagecache asks. kernel_pages.go keeps readers from caching old bytes for good
// when an invalidation meets a write in flight.
//
// # Files, from bottom to top
//
// A file may refer to the files before it. internal/ratchet counts the references that run the other way, and lets
// them only become fewer.
//
//	values:     errno proc credentials mountinfo fusermount interrupt readers testing guard
//	source:     strict witness events_parse events events_marks tree below
//	nodes:      node descriptors node_table handles unlinked passthrough kernel_opens callers
//	kernel:     kernel_pages longer
//	mount:      filesystem
//	content:    change file_direct file_source times growth file_parallel disk_errors
//	requests:   attr lookup pinning remove setattr file dir file_read create file_write file_space showing
//	            file_ioctl xattr ahead expiry
//	server:     read_only connection mountpoint hold server timed
//
// # Locks, in the order they are taken
//
//	fileSystem.touching read-locked while the daemon makes requests of its own mount; no other lock is held then
//	node.names         of a directory: read-locked while a name in it is resolved, locked while one goes away or
//	                   moves; of two directories, the one with the lower node number first
//	content.telling    one request at a time tells the kernel of a new size (longer.go)
//	openFile.mu        locked while the open is closed; nobody else waits for it (openFile.use)
//	content.gate       read-locked around every change of home
//	content.pushing    read-locked while pages are pushed; whoever answers a READ does not wait for it
//	openDir.mu         the position and buffer of an open directory
//	node.mu            descriptor and locator
//	nodeTable.placing  the locator of a directory changes
//	nodeTable shards   lookup counts and the two indexes
//	descriptors.mu     the ring of open descriptors; taken under node.mu, and only ever tries a node.mu itself
//	events.reading     held while events are read
//	events.mu          what is watched; no system call is made under it
//	witness.mu, witnesses.mu, hazard.mu, passthrough.mu, hold.mu, ahead.mu: leaves
//
// The server of a filesystem mounted in a directory may hang. So no request asks that server while it holds the
// directory's names or a node.mu. The kernel locks the directory too for LOOKUP and READDIRPLUS: these answer with what
// the kernel knows of the other filesystem's root (statxIn). GETATTR and OPEN take a descriptor under the lock and use
// it afterwards. One case is left: inside the hung filesystem, a directory waits for a name in it that is being looked
// up.
//
// No lock is held while the kernel is told to drop pages, because the kernel may wait for a page that a read request
// has locked. The exceptions are content.telling and a read-locked openFile.mu. No request waits for either while it
// holds content.gate or has a page locked.
//
// # Processes
//
// A mount has a guard (guard.go): a process that ends the kernel's connection if a killed daemon cannot die. Otherwise
// every program that uses the mount could hang. Programs that mount call Guard first thing in main.
//
// # Ownership
//
// A node owns its descriptor; hold and unhold bracket its use. An openFile and an openDir own theirs until RELEASE. A
// Home (pagecache.Home) owns its own, and outlives node and handle.
//
// # What it does not do
//
// It does not lock files: the kernel keeps fcntl and flock locks itself, because all users of the mount are on one
// machine. It forwards no ioctl except those of inode flags. It decides nothing about coherence.
package fs
