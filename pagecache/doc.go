// Package pagecache knows which pages of which files are where, and carries out what package lrc decides.
//
// # Model
//
// A Cache belongs to one mount. A File exists from the first time a device maps a file until nothing of the file is
// resident on any device; files that no device has anything to do with cost nothing here, and package fs does not call
// in. Home is the backing file as buffered I/O sees it. A device holds a file in extents, each of which caches a range
// of its pages. Package residency owns their memory: who has it, how large extents are, and what goes when a device is
// full; File is what it calls a Key (evict.go). Package mover makes every call of a device that moves bytes. A Mapping
// is one client's window on one device's extents; its extents are pinned while it lives.
//
// # Locks, in the order they are taken
//
// docs/dev/locks.md has those of the whole daemon, as a tree.
//
//	Group.mu           one release or abort of a group at a time
//	File.turn          a channel with room for one: the read of released bytes that waits for File.mu
//	File.mu            the lrc machine, extents, bases and every change of home made here; writes of different pages
//	                   share it
//	writes.mu          what such writes do to the above
//	File.lookMu        who looks for the status
//	lanes.mu, Cache.mu the background's work on files; the list of files
//	pendingHold.mu     who keeps the mount busy; held while Options.Hold is called, which does not block
//	File.readingMu     how many reads of home go on
//	flights.mu         what readers see before home has it; a leaf
//	publications.mu    versions of files; a leaf
//	pageMemory.mu      a leaf, and so are the locks of package cleanread
//	mover.Device.mu    which transfers of a device wait and are under way
//	mover.Place.mu     what is known of a device's or of the disk's speed; a leaf
//	residency.Device.mu
//	                   who has how much of a device's memory; a leaf
//	counters           atomics
//
// File.mu may be held across I/O on home and across copies to and from a device. It is never held across an
// invalidation of the kernel's pages: the kernel waits for page locks, and a page may be locked by a read that waits
// for File.mu. So a release publishes under File.mu, unlocks, invalidates from a goroutine made for it, and locks
// again to mark the pages drained.
//
// # How long File.mu is held
//
// An acquire, a flush and an eviction let go of File.mu now and then, and no page is half done when they do. An acquire
// begins transfers for holdTime, 20 ms, and then waits for those that are under way: up to MaxReaders reads of
// PieceBytes (package mover), which are 5 ms of a disk that gives 5 GB/s and 0.25 s of one that gives 100 MB/s. Before
// them it collects at most holdCollect pages (64 MiB) and copies at most holdPeer (1 GiB) from other devices. A request
// that finds File.mu held waits for one such hold, and for a second one if another goroutine was quicker: Go's mutex
// then hands over.
//
// Nobody waits for the disk under File.mu where home can be read past the host's page cache (homefile.go): such reads
// go on without it, and are taken under it.
//
// The goroutines of a transfer (fill.go, and package mover) work for the holder, who waits for them: they may read what
// File.mu protects, and change nothing of it.
//
// # Files that hang
//
// A backing filesystem may never answer: a network filesystem, or a FUSE server that sleeps. Whoever waits for it holds
// File.mu of that file, and nobody else may wait for it. So whoever works for several files does not lock File.mu in
// turn: lanes.go does the background's work, and Close's, file by file; the status shows a file that is stuck as it was
// seen last (glance.go); an eviction goes on to the next file (evict.go). File.stuck tells from outside how long the
// lock has been held. No shared lock is held while home is opened, closed, read or written.
//
// # Reads on the CPU
//
// A read first brings home what is pending of its pages (read.go). Package cleanread serves what home has from the
// host's page cache, from what was read ahead, from a device or from the disk; cleanread.go tells it who has what. A
// read of what did not change since others read it takes no File.mu. Other reads take it for microseconds, and no read
// holds it while bytes are copied. What was found out under File.mu stays valid until the region's epoch changes: the
// lrc machine reports every change of a page, and whoever changes bytes without it calls File.changed before. A copy
// holds its extents, so whoever uses memory last gives it back; a Map that needs it waits for that.
//
// What a read has to bring from devices flies (flight.go): the read has it at once, and home is written beside. Home is
// what the backing file has with flights laid over it; whoever else looks at the backing file lands them there first.
//
// # Views
//
// A View is read-only memory with chosen bytes of files, packed (package view). It is a copy of home that no program
// stores into, so lrc does not know of it: whatever changes home says so to the views of the file (spoilLocked). An
// acquire of a view copies what is stale: what devices released and home does not have yet from them, under File.mu,
// the rest without it (views.go, viewstraight.go, viewfill.go). Its memory is package residency's as that of files,
// with the View as the Key, and stays until it is needed for something else.
//
// # Groups
//
// A Group's release publishes stores into several ranges and files at once, with a version (group.go, undo.go). Every
// acquire gets all of a group or nothing (publications.go, acquireall.go).
//
// # Digests
//
// What a replica agreed on with home is known by a digest per page. The host takes it from the bytes that it copied
// wherever a program may be storing into the page meanwhile: those with the memory in their hands (Mapping.exported).
// Where none can, the device takes it from its copy, at the speed of its memory, before a program is given the memory.
//
// # Loss of a device
//
// Whatever call of a device says so first, every File lets go of what the device had (loss.go): at once the one that
// found out, the others when the background's lanes come to them. Released pages that were not home are named in the
// log, in Status and by Close, and the next Sync of their File fails once; until then the File stays. Memory that a
// client maps, and its descriptors, live until it has unmapped.
//
// # What it does not do
//
// It speaks neither FUSE nor the clients' protocol and authorises nobody.
package pagecache
