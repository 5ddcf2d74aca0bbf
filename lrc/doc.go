// Package lrc holds the rules of coherence of gaiafs: home-based lazy release consistency over the pages of a file,
// and the byte-wise merge that goes with it.
//
// # Model
//
// A File is a pure state machine. It does no I/O, holds no lock, reads no clock and starts no goroutine. Whoever
// changes something asks the File for a plan, carries the plan out and commits it (package pagecache does). Calls on
// one File must not overlap; plans may.
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
// bytes, so no copy exists. Any other Base names a copy that the caller keeps for that page. Copies are made only when
// home is about to change under a tracked replica, and all replicas of a page that agree share one. A replica is
// tracked when a program may be storing into it. An untracked one has no base, for it cannot differ. BaseZero is the
// base of memory that a program may be storing into before anything was brought there.
//
// The rules know the place where states are kept by an interface, states, and use nothing else of it. Type runs keeps
// the states of pages that agree once, and remembers what it decoded and changed last. Its slow twin keeps a state for
// each page. Under the build tag slowtwin a File has both, and panics where they answer differently.
//
// # The states of a replica
//
// A device's replica of a page is in one of these states. "Stale" says that home contains releases that the replica
// does not. "Pending" says that the device released bytes that home does not contain yet; a pending replica may be
// stale as well.
//
//	absent    the device does not hold the page
//	clean     it has home's bytes, and nobody stores into it
//	old       like clean, but stale
//	tracked   programs may be storing into it, and home is its base
//	based     programs may be storing into it, and its base is a copy; stale, or about to be
//	hollow    programs may be storing into zeros that home's bytes were never brought to; stale
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
//	pending  → tracked            CollectPlan.Commit, where home has exactly what was collected
//	pending  → based              CollectPlan.Commit, where home has more
//	tracked, based → clean        Untrack; based ones become old
//	hollow   → absent             Untrack
//	every    → clean or tracked   TruncatePlan.Commit: all agree on zeros
//	clean, old, tracked, based, hollow → absent  EvictPlan.Commit
//	every    → absent             EvictPlan.Commit with Lossy: what was pending is lost too
//
// # The page in the kernel
//
//	not held → held               CPURead, WritePlan.Commit of a page written whole
//	held     → draining           ReleasePlan.Commit, Redrop
//	draining → not held           Drain.Dropped, Drain.GiveUp
//	draining → held and draining  a program writes the page whole meanwhile; Dropped then returns another Drain
//
// While a page drains, the kernel may still write a dirty copy of it home that was read before the release. Such a
// write carries whole pages, old bytes included, so home must not be changed by a collect before it arrived, or it
// would undo the collected bytes. Pending therefore leaves draining pages out, but for a read that enters the kernel's
// page cache: the kernel asks for a page only when it holds no copy of it.
//
// A program may write a whole page while it drains, after the kernel dropped it: then the kernel holds the page again,
// without what was released. A release returns only when there are no such pages, so the kernel never holds a page that
// lacks what was released and has drained. Pending relies on that.
//
// # Plans
//
// A plan says what the executor has to do, in order, and takes back what happened. The numbers are those of the rules
// in docs/consistency.md.
//
//	AcquirePlan   1, 5  bring home's bytes to a device; BeginRelieve does so to be rid of copies of bases
//	ReleasePlan   2, 6  publish what a device stored; its Commit returns a Drain
//	CollectPlan   3     bring home what a device released
//	WritePlan     4     change home on behalf of the CPU
//	ExposePlan    9     track memory that a program is about to store into
//	EvictPlan           take pages from a device
//	TruncatePlan        cut home
//	ComparePlan         make up for changes of home that nobody announced
//
// Whoever needs something to be home first asks for what is Pending and collects it by a plan for each run of one
// owner, until nothing is: before an acquire and an eviction, for a CPURead (7), and where a WritePlan has something to
// Collect or a ReleasePlan has. Three events need no plan, since nobody has to do anything for them: CPURead, Untrack
// and Hollow.
//
// A plan is open from Begin until it is committed or aborted; a WritePlan that has something to Collect has not begun.
// These are what aborts leave behind:
//
//	WritePlan, CollectPlan   all as it was before: copies that Keep asked for are not the base of anything. After a
//	                         Commit of some pages of a CollectPlan the others stay pending and keep their copies,
//	                         since home may have changed there in part
//	AcquirePlan              End is both: what was reported by Updated is up to date, the rest as it was
//	all others               all as it was: they change nothing before they are committed
//	Drain                    cannot be aborted, only given up
//
// Plans to write, collect, acquire, expose, truncate and compare have their pages for themselves: no two of them that
// are open share a page, and no event or commit of another plan changes one, but for a Lossy EvictPlan. Plans to
// release and to evict, and drains, hold nothing: other plans come and go on their pages, and must be over when they
// are committed.
//
// Under the build tag invariants misuse panics:
//
//   - a plan begins, or is widened, over pages that another one has for itself;
//   - a plan to release or to evict is committed, or Untrack or Hollow called, while another one has the pages;
//   - a plan is committed, aborted, reported or dropped after it ended, or without having begun;
//   - a plan is committed or reported for pages that it is not for, or out of order;
//   - a plan is committed or reported after its owner lost pages of it;
//   - an acquire begins, or an eviction is committed, while something of the pages has to come home before;
//   - what is collected is not what Pending returned;
//   - what is reported by Updated was not stale, what is exposed was not Untracked;
//   - CheckEnded is called while a plan is open.
//
// Without the tag nobody keeps account of plans, and it costs nothing.
package lrc
