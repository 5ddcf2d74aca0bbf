// Package lrc holds the rules of coherence of gaiafs: home-based lazy release consistency over the pages of a file,
// and the byte-wise merge that goes with it.
//
// # Model
//
// A File is a pure state machine. An event goes in (a device released these pages, the CPU is about to write those),
// and what has to be done comes back, in runs of pages. It does no I/O, holds no lock, reads no clock and starts no
// goroutine; whoever calls it (package pagecache) carries the answer out and reports back. Calls on one File must not
// overlap.
//
// For each page there is
//
//   - released: the page's version vector, which counts for every owner the releases it made of the page;
//   - home: the releases that the home bytes contain;
//   - for the CPU, whether the kernel may hold the page. A page the kernel holds is as home was when it was read,
//     and every release by a device drops it, so the CPU needs no vector of its own;
//   - for each device that holds the page, a replica: its version vector, where its base is, and whether it is
//     tracked.
//
// The base of a replica is the bytes it had when it last agreed with home. BaseHome says that home still has those
// bytes, so no copy exists. Any other Base names a copy that the caller keeps for that page: bases are made only when
// home is about to change under a tracked replica, and all replicas of a page that agree share one. A replica is tracked
// when a program may be storing into it; an untracked one has no base, for it cannot differ. BaseZero is the base of memory that
// a program may be storing into before anything was brought there: it is tracked, stale, and compared with zeros.
//
// A page is
//
//   - pending for a device, when the device released it and home does not contain that release yet;
//   - stale on a device, when home contains releases that the replica does not;
//   - draining, from the moment that a release published it until the kernel's copy is known to be gone.
//
// # The rules, by the numbers of docs/consistency.md
//
//	Fill       Pending, Collected…, Stale, Updated        (1, 5)
//	Expose     Stale, the above or Evicted, Track, Hollow (9)
//	Release    Release, Drained, Redrop, Drained…         (2)
//	Collect    Pending, KeepBases, Collected              (3)
//	CPU write  Pending, Collected…, KeepBases, CPUWrote   (4)
//	CPU read   Pending, Collected…, CPURead               (7)
//
// # Draining
//
// While a page drains, the kernel may still write a dirty copy of it home that was read before the release. Such a
// write carries whole pages, old bytes included, so home must not be changed by a collect before it arrived, or it
// would undo the collected bytes. Pending therefore leaves draining pages out, but for a read that enters the kernel's
// page cache: the kernel asks for a page only when it holds no copy of it.
//
// A program may write a whole page while it drains, after the kernel dropped it: then the kernel holds the page again,
// without what was released. Redrop finds such pages. A release returns only when there are none, so the kernel never
// holds a page that lacks what was released and has drained; Pending relies on that.
package lrc
