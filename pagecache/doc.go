// Package pagecache knows which pages of which files are where, and carries out what package lrc decides.
//
// # Model
//
// A Cache belongs to one mount. A File exists from the first time a device maps a file until nothing of the file is
// resident on any device; files that no device has anything to do with cost nothing here, and package fs does not
// call in. Home is the backing file as buffered I/O sees it. A device holds a file in extents: extent k caches the
// file's bytes [k·E, (k+1)·E), E being chosen when the device first maps the file. A Mapping is one client's window
// on one device's extents; its extents are pinned while it lives.
//
// # Locks, in the order they are taken
//
//	Cache.evictMu      one reservation at a time makes room on a device
//	File.mu            the lrc machine, extents, bases and every change of home made here
//	Cache.mu           the list of files and the allocation order of extents
//	counters           atomics
//
// File.mu may be held across I/O on home and across copies to and from a device. It is never held across an
// invalidation of the kernel's pages: the kernel waits for page locks, and a page may be locked by a read that waits
// for File.mu. So a release publishes under File.mu, unlocks, invalidates from a goroutine made for it, and locks
// again to mark the pages drained.
//
// # What it does not do
//
// It speaks neither FUSE nor the clients' protocol and authorises nobody.
package pagecache
