// Package cleanread serves CPU reads of pages that home has, from the place that is fastest: the host's page cache,
// pages read ahead from devices, a device whose copy matches home, or the disk. It owns the clean cache, read-ahead
// from devices, and the choice of the device.
//
// # Model
//
// A Cache belongs to a mount, a File to a file that is on devices. The Executor of coherence, package pagecache, says
// what devices have of a file (Facts) and when something changes (File.Changed). It brings pending pages home before it
// asks for a read to be served: this package never sees a page that home lacks.
//
// A read gets bytes that home had at some moment between the read's begin and end. A read of home itself guarantees no
// more, so the consequences for the kernel's pages are the same. Bytes from a device are home's bytes because
//
//   - no program can have stored into the pages, and nothing about them changed until they were copied: the epochs of
//     their regions are the same as when the Facts were made; or
//   - the copied bytes have the digests that the device agreed on with home when the read began. Such pages are
//     tracked.
//
// So the device serves a page that a program stores into up to the first store, and again after the page was released
// and collected.
//
// A reader waits for a device for a bounded time (Cache.patience), and then reads home. The abandoned copy keeps its
// buffer and its extents until it ends. Until then no read goes to that device.
//
// # The choice
//
// A read goes to the place that is expected to be fastest, by what reads of its size took there lately under the same
// load (package cost). The price of a device includes the reader's own work. A small part of the time is spent on
// trials of the other places. Places that get no reads at all are measured in the background. The same holds for reads
// that bring the chunk around them. BenchmarkChoice compares the choice with the disk alone and with the device alone.
//
// # Epochs
//
// A region is 2 MiB of a file. Its epoch is a number that only grows. It grows before anybody can see a change in the
// region: before home changes and after, before a release tells the kernel to drop pages, before a device's bytes
// change, and before a program is given memory for writing.
//
// Memory that is taken away while a reader holds it stays until the reader lets go of it. Memory that is moved, or
// reused while a reader holds it, needs more care. The goroutine that moves or reuses it first advances the epoch and
// then checks who holds the memory. The reader first holds the memory and then checks the epoch (File.plan). So one of
// the two notices the other.
//
// # States
//
// What is known of a region without the executor's lock:
//
//	nothing   ──a read finds nothing pending (Publish)──▶ asked
//	asked     ──another read, at the same epoch──▶ published     who has what; reads take no lock
//	asked, published ──Changed, Close──▶ nothing
//
// A copy from a device; package mover has the states of the call:
//
//	facts ──plan──▶ held ──Start──▶ under way ──▶ copied ──verify──▶ home's, or doubtful
//	  │               │                 │
//	  └─the epoch has └─Start, after    └─Wait gives up: the read goes to home, and the end of
//	    changed         Stop: home        the copy lets go of the memory
//
// A chunk, 128 KiB in the clean cache:
//
//	expected ──a copy was planned──▶ on its way ──fill──▶ ready ──▶ gone
//	    │                                │                 │
//	    └─no device is faster: gone      └─not home's,     └─all of it was read or pushed, its epoch has changed,
//	                                       or late: gone     nobody read it for long, or others are worth more
//
// A chunk that came with a read, and is read again through the kernel's page cache, is pushed into that.
//
// A chunk's memory is freed when the chunk has left its table and the last reader that copies from it is done.
//
// # Locks
//
// The executor's lock comes first. Haves, NothingPending, Changed, Publish, Facts and Close are called with it held.
// The other methods take it through the Executor, while they hold none of the locks below. None of these is held during
// a call of a device, of home or of the Executor, except for Executor.Count.
//
//	Cache.mu             the start of background work, against Stop
//	chunkStore.mu        read-locked while chunks are kept or dropped; locked to end that
//	  chunkStore.orderMu their age
//	    chunkTable.mu    the chunks of one file; held while home is asked what the host's page cache has
//	      chunkMemory.mu memory for chunks
//
// # What it does not do
//
// It brings nothing home, makes the kernel drop nothing, and changes no state of a page.
package cleanread
