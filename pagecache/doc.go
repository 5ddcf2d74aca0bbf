// Package pagecache knows which pages of which files are where. It carries out what package lrc decides.
//
// # Model
//
// A Cache belongs to one mount. A File is created when a device first maps a file, and lives until no device holds
// anything of that file. Files that no device uses cost nothing here: package fs does not call this package for them.
// Home is the backing file as buffered I/O sees it.
//
// A device holds a file in extents. Each extent caches a range of the file's pages. Package residency owns the memory
// of extents: who has it, how large extents are, and which of them go when a device is full. It calls a file on one
// device a Key (evict.go). Package mover makes every device call that moves bytes. A Mapping is one client's window on
// the extents of one device. A Mapping pins its extents while it lives.
//
// # Locks, in the order they are taken
//
// docs/dev/locks.md has the locks of the whole daemon, as a tree.
//
//	Group.mu           one release or abort of a group at a time
//	File.turn          a channel with room for one: the read of released bytes that waits for File.mu
//	File.mu            the lrc machine, extents, bases and every change of home made here; writes of different pages
//	                   share it
//	writes.mu          changes that such writes make to the fields under File.mu
//	sight.mu           who looks for the status
//	lanes.mu, Cache.mu the background's work on files; the list of files
//	pendingHold.mu     who keeps the mount busy; held while Options.Hold is called, which does not block
//	home.Home.readsMu  how many reads of home are under way
//	flights.mu         what readers see before home has it; a leaf
//	publications.mu    versions of files; a leaf
//	pageMemory.mu      a leaf, and so are the locks of package cleanread
//	mover.Device.mu    which transfers of a device wait and which are under way
//	mover.Place.mu     the measured speed of a device or of the disk; a leaf
//	residency.Device.mu
//	                   who has how much of a device's memory; a leaf
//	counters           atomics
//
// File.mu may be held across I/O on home and across copies to and from a device. It is never held across an
// invalidation of the kernel's pages: the kernel waits for page locks, and a page may be locked by a read that waits
// for File.mu. A release therefore publishes under File.mu, unlocks, invalidates from a goroutine of its own, and locks
// again to mark the pages as drained.
//
// # Files, from bottom to top
//
// A file may refer to the files before it. internal/ratchet counts the references that run the other way, and lets
// them only become fewer.
//
//	values:     printable ranges lifetime heap counters account digests pagememory lock source mixed
//	            pending
//	home:       home homefile lead flight growth beside locked hot
//	kernel:     kernel cleanread
//	memory:     extent preference sharing pinning movable evict
//	file:       viewlist file base publications
//	plans:      peers relays portion waiting loss acquire collect expose fill compare release relief write read
//	            change
//	clients:    acquireall mapping kept bracket advise views group viewfill viewpeers viewshare viewmapping
//	            viewstraight recording
//	cache:      eviction lanes cache settings viewstatus glance background status inspect unused
//
// # How long File.mu is held
//
// An acquire, a flush and an eviction unlock File.mu from time to time. No page is half done at such a point. An
// acquire starts transfers for holdTime, 20 ms, and then waits for those under way. These are up to MaxReaders reads of
// PieceBytes (package mover): 5 ms on a disk with 5 GB/s, 0.25 s on a disk with 100 MB/s. Before the transfers, an
// acquire collects at most holdCollect pages (64 MiB) and copies at most holdPeer (1 GiB) from other devices. A request
// that finds File.mu held waits for one such hold. It waits for a second one if another goroutine gets the lock first;
// Go's mutex then hands the lock over.
//
// If home can be read past the host's page cache (homefile.go), nobody waits for the disk under File.mu. Such reads
// run without the lock, and their results are applied under it.
//
// The goroutines of a transfer (fill.go and package mover) work for the holder of File.mu, which waits for them. They
// may read the fields that File.mu protects, but must not change them.
//
// # Files that hang
//
// A backing filesystem may never answer, for example a network filesystem or a FUSE server that sleeps. The goroutine
// that waits for it holds that file's File.mu. Other files must not be delayed, so code that works on several files
// never locks one File.mu after another:
//
//   - The background's work and Close run file by file in lanes (lanes.go).
//   - The status shows a stuck file as it was last seen (glance.go).
//   - An eviction moves on to the next file (evict.go).
//
// File.stuck reports, without taking the lock, whether it has been held for too long. No shared lock is held while home
// is opened, closed, read or written.
//
// # Reads on the CPU
//
// A read first brings home the pending bytes of its pages (read.go). Package cleanread then serves what home has: from
// the host's page cache, from read-ahead memory, from a device or from the disk. cleanread.go tells it who has what. A
// repeated read of unchanged bytes takes no File.mu. Other reads take it for microseconds, and no read holds it while
// bytes are copied. Facts read under File.mu stay valid until the region's epoch changes: the lrc machine reports every
// change of a page, and code that changes bytes without lrc calls File.changed first. A copy holds its extents, so the
// last user of the memory frees it, and a Map that needs the memory waits for that.
//
// If a read has to fetch bytes from devices, the bytes fly (flight.go): the read gets them at once, and they are
// written home concurrently. What home has is the backing file with the flights laid over it. Code that reads the
// backing file directly lands the flights first.
//
// # Views
//
// A View is read-only device memory with chosen bytes of files, packed (package view). It is a copy of home that no
// program stores into, so lrc does not know it. Every change of home is reported to the views of the file
// (spoilLocked). An acquire of a view copies the stale bytes. Those that devices released and home does not have yet
// come from the devices, under File.mu; the rest comes from home, without it (views.go, viewstraight.go, viewfill.go).
// Package residency owns the memory of a View as it does that of a file, with the View as the Key. The memory stays
// until it is needed for something else. A fill begins before the memory is zeroed: the fill zeroes an extent before
// bytes go there, and the export does so before a client gets it, whichever is first.
//
// # Locked pages
//
// The pages of a file that is pinned on the host are page-locked in the host's page cache, and devices copy from there
// (locked.go). Every change of home unlocks them, and the background locks them again. It also locks those of files
// that are loaded again and again (hot.go).
//
// # Groups
//
// The release of a Group publishes stores into several ranges and files at once, with a version (group.go).
// Every acquire gets all of a group or nothing (publications.go, acquireall.go).
//
// # Digests
//
// A digest per page records the bytes that a replica last agreed on with home. If clients have been given the memory
// (Mapping.exported), programs may be storing into the page, so the host computes the digest from the bytes that it
// copies. Otherwise the device computes it from its own copy, at the speed of its memory, before a client gets the
// memory.
//
// # Loss of a device
//
// Any device call may report that the device is lost. Every File then drops what the device had (loss.go): the File
// that made the call at once, the others when the background's lanes reach them. Released pages that were not home yet
// are named in the log, in Status and by Close, and the next Sync of their File fails once. The File stays until then.
// Memory that a client maps, and its descriptors, live until the client has unmapped it.
//
// # What it does not do
//
// It speaks neither FUSE nor the clients' protocol, and it authorises nobody.
package pagecache
