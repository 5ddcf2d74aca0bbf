// Package cleanread serves reads of programs on the CPU, of pages that home has, from wherever they are there soonest:
// the host's page cache, what was read ahead from devices, a device that has them as home has, or the disk. It owns the
// clean cache, read-ahead from devices, and the choice of the device.
//
// # Model
//
// A Cache belongs to a mount, a File to a file that devices hold something of. The Executor of coherence, package
// pagecache, says what devices have of a file (Facts) and when something changes (File.Changed). It brings home what is
// pending before it asks for a read to be served: this package never sees a page that home lacks.
//
// A read gets what home had at some moment between its begin and its end, as one of home itself does; what follows from
// that for the kernel's pages is the same for both. What a device gave is home's because
//
//   - no program can have stored into the pages, and nothing changed of them until they were copied: the epochs of
//     their regions are those of when that was found out; or
//   - the digests of the copied bytes are those that the device agreed on with home when the read began. Such pages are
//     tracked.
//
// So a page that a program stores into is served from the device up to its first store, and again once it was released
// and collected.
//
// Nobody waits for a device for longer than a bound (Cache.patience), and then reads home. The copy that was given up
// keeps its buffer and its extents until it ends; meanwhile no read goes to that device.
//
// # The choice
//
// A read is asked of whoever is thought to give it first, by what reads of its size took there lately, under as much
// load (package cost). What the reader does besides is part of the price of a device. A small part of the time goes for
// trials of the others; what nobody asks at all is measured in the background. The same holds for reads that bring what
// is around them. BenchmarkChoice compares with the disk and with the device alone.
//
// # Epochs
//
// A region is 2 MiB of a file. Its epoch is a number that only grows; it does so before anybody can see that something
// of the region is not as it was: before home changes and after, before a release tells the kernel to drop pages,
// before a device's bytes change, and before a program is given memory for writing.
//
// Memory that is taken away while somebody holds it stays until he lets go of it. Memory whose bytes move, or that is
// to be used for something else while it is held, needs more: who does that advances the epoch first and then looks who
// holds it; who reads holds it first and then looks at the epoch (File.plan). So one of the two notices the other.
//
// # States
//
// What is known of a region without the executor's lock:
//
//	nothing   ──a read finds nothing pending (Publish)──▶ asked
//	asked     ──another read, at the same epoch──▶ published     who has what; reads take no lock
//	asked, published ──Changed, Close──▶ nothing
//
// A copy from a device, of which package mover has the states of the call:
//
//	facts ──plan──▶ held ──Start──▶ under way ──▶ copied ──verify──▶ home's, or doubtful
//	  │               │                 │
//	  └─the epoch is  └─Start, after    └─Wait gives up: the read goes to home, and who ends the
//	    another one     Stop: home        copy lets go of the memory
//
// A chunk, 128 KiB in the clean cache:
//
//	expected ──a copy was planned──▶ on its way ──fill──▶ ready ──▶ gone
//	    │                                │                 │
//	    └─no device is faster: gone      └─not home's,     └─all of it was read, its epoch is another one, nobody
//	                                       or late: gone     read it for long, or others are worth more
//
// A chunk's memory goes back when it has left its table and the last one who copies from it is done.
//
// # Locks
//
// The executor's lock comes first. Haves, NothingPending, Changed, Publish, Facts and Close are called with it held;
// the others take it through the Executor, and hold none of the following then. None is held while a device, home or
// the Executor is called, but for Executor.Count.
//
//	Cache.mu             what begins in the background against Stop
//	chunkStore.mu        read-locked while chunks are kept or dropped; locked to end that
//	  chunkStore.orderMu their age
//	    chunkTable.mu    the chunks of one file; home is asked under it what the host's page cache has
//	      chunkMemory.mu memory for chunks
//
// # What it does not do
//
// It brings nothing home, tells the kernel nothing, and changes no state of a page.
package cleanread
