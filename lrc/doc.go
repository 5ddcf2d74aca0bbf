// Package lrc implements gaiafs's rules of coherence: home-based lazy release consistency over the pages of a file, and
// the byte-wise merge that it needs.
//
// # Model
//
// A File is a pure state machine. It does no I/O, holds no lock, reads no clock and starts no goroutine. To change
// something, the executor (package pagecache) asks the File for a plan, carries the plan out and commits it. Calls on
// one File must not overlap; plans may.
//
// Each page has
//
//   - released: the page's version vector, which counts the releases that each owner made of the page;
//   - home: the releases that the home bytes contain;
//   - for the CPU, whether the kernel may hold the page. The kernel's page has the bytes that home had when it was
//     read, and every release by a device drops it, so the CPU needs no vector of its own;
//   - for each device that holds the page, a replica: its version vector, where its base is, and whether it is tracked.
//
// The base of a replica is the bytes that it had when it last agreed with home. BaseHome means that home still has
// those bytes, so no copy exists. Any other Base names a copy that the caller keeps for that page. Copies are made only
// when home is about to change under a tracked replica, and all replicas of a page that agree share one copy. A replica
// is tracked while a program may be storing into it. An untracked replica has no base, because it cannot differ.
// BaseZero is the base of memory into which a program may store before home's bytes were brought there.
//
// The rules use the storage of states only through the interface states. Type runs keeps one encoding for pages with
// equal states, and caches what it decoded and changed last. Its slow twin keeps a state for each page. Under the build
// tag slowtwin a File has both, and panics if their answers differ.
//
// # The states of a replica
//
// A device's replica of a page is in one of these states. "Stale" means that home contains releases that the replica
// lacks. "Pending" means that the device released bytes that home lacks; a pending replica may be stale as well.
//
//	absent    the device does not hold the page
//	clean     it has home's bytes, and no program stores into it
//	old       like clean, but stale
//	tracked   programs may be storing into it, and home is its base
//	based     programs may be storing into it, and its base is a copy; stale, or about to be
//	hollow    programs may be storing into memory of zeros that home's bytes never reached; stale
//	pending   tracked, based or hollow, and released
//
// and these are all transitions of it:
//
//	absent   → clean, tracked     AcquirePlan.Updated, without and with track
//	absent   → hollow             Hollow
//	clean    → tracked            ExposePlan.Commit
//	clean    → old                another's CollectPlan.Commit, WritePlan.Commit, ComparePlan.Commit
//	old      → clean, tracked     AcquirePlan.Updated
//	tracked  → based              BeginWrite, BeginCollect of another's, ComparePlan.Commit: home is about to change
//	based    → tracked            AcquirePlan.Updated; Abort of the plan that made the copy
//	hollow   → tracked            AcquirePlan.Updated
//	tracked, based, hollow → pending             ReleasePlan.Commit
//	pending  → tracked            CollectPlan.Commit, if home has exactly the collected bytes
//	pending  → based              CollectPlan.Commit, if home has others' bytes too
//	tracked, based → clean        Untrack; based ones become old
//	hollow   → absent             Untrack
//	every    → clean or tracked   TruncatePlan.Commit: all agree on zeros
//	clean, old, tracked, based, hollow → absent  EvictPlan.Commit
//	every    → absent             EvictPlan.Commit with Lossy: pending bytes are lost
//
// # The page in the kernel
//
//	not held → held               CPURead, WritePlan.Commit of a page written whole
//	held     → draining           ReleasePlan.Commit, Redrop, CPUReadMerged
//	draining → not held           Drain.Dropped, Drain.GiveUp
//	draining → draining           CPUReadMerged of a page that a release drains: the kernel held no copy any more
//	draining → held and draining  a program writes the page whole meanwhile; Dropped then returns another Drain
//
// While a page drains, the kernel may still write home a dirty copy that was read before the release. Such a write
// carries whole pages with their old bytes. If a collect changed home before that write arrived, the write would undo
// the collected bytes. So Pending leaves draining pages out. The exception is a read that enters the kernel's page
// cache, because the kernel asks for a page only if it holds no copy of it.
//
// Pages of an earlier release that home did not take are not left out either, if they drain because of CPUReadMerged or
// of a further release. Programs have seen the earlier release, and the kernel's copies are no older. They lack what
// devices bring home later. So the executor keeps the bytes that the kernel got by CPUReadMerged. If the kernel writes
// such a page home, the executor writes only what a program changed.
//
// After the kernel dropped a draining page, a program may write the whole page while it still drains. Then the kernel
// holds the page again, without the released bytes. A release returns only when there are no such pages. So the kernel
// never holds a page that lacks bytes whose release has drained. Pending relies on that.
//
// # Plans
//
// A plan tells the executor what to do, in order, and records the outcome. The numbers are those of the rules in
// docs/consistency.md.
//
//	AcquirePlan   1, 5  bring home's bytes to a device; BeginRelieve does so to get rid of base copies
//	ReleasePlan   2, 6  publish what a device stored; its Commit returns a Drain
//	CollectPlan   3     bring home what a device released
//	WritePlan     4     change home on behalf of the CPU
//	ExposePlan    9     track memory that a program is about to store into
//	EvictPlan           take pages from a device
//	TruncatePlan        truncate home
//	ComparePlan         account for changes of home that nobody announced
//
// Some steps need released bytes to be home first: an acquire, an eviction, a CPURead (7), and a WritePlan or
// ReleasePlan with something to Collect. The executor then asks for what is Pending, and collects it with a plan for
// each run of one owner, until nothing is pending. Three events need no plan, because the executor has nothing to do
// for them: CPURead, Untrack and Hollow.
//
// A plan is open from Begin until it is committed or aborted. A WritePlan with something to Collect has not begun. An
// abort has these effects:
//
//	WritePlan, CollectPlan   nothing changes: copies that Keep asked for are not the base of anything. After a
//	                         Commit of some pages of a CollectPlan the others stay pending and keep their copies,
//	                         because home may have changed there in part
//	AcquirePlan              End is both: pages reported by Updated are up to date, the rest is unchanged
//	all others               nothing changes: they change nothing before they are committed
//	Drain                    cannot be aborted, only given up
//
// Plans to write, collect, acquire, expose, truncate and compare have exclusive use of their pages. No two open plans
// of these kinds share a page. No event or commit of another plan changes their pages, except that of a Lossy
// EvictPlan. Plans to release and to evict, and drains, hold no pages: other plans may begin and end on their pages,
// but none may be open there when they are committed.
//
// Under the build tag invariants misuse panics:
//
//   - a plan begins, or is widened, over pages that another one holds;
//   - a plan to release or to evict is committed, or Untrack or Hollow is called, while another plan holds the pages;
//   - a plan is committed, aborted, reported or dropped after it ended, or before it began;
//   - a plan is committed or reported for pages that it does not have, or out of order;
//   - a plan is committed or reported after its owner lost pages of it;
//   - an acquire begins, or an eviction is committed, while bytes of the pages have to come home first;
//   - collected runs are not what Pending returned;
//   - pages reported by Updated were not stale, or exposed pages were not Untracked;
//   - CheckEnded is called while a plan is open.
//
// Without the tag, plans are not recorded, and the checks cost nothing.
package lrc
