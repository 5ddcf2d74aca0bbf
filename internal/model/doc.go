// Package model says what gaiafs has to do, as a small, slow, obvious program, and makes random programs that the real
// thing is checked with. Only tests import it.
//
// # Model
//
// A Model is one file of a few pages, the kernel's copies of its pages, and the replicas of a few devices. It is the
// naive design: every replica has a full copy of its own base, version vectors are maps, merging is a loop over bytes.
// It shares no code with packages lrc and pagecache. Do carries out one Step and says what a read or load returns.
//
// A System is anything that carries out Steps. Check runs a program on a System and on the Model side by side and says
// where they part. An Oracle knows nothing of homes, bases and versions: from the order of stores, releases and
// acquires alone it says which values a read may return, so that a mistake that Model and System share is found too.
//
// The Model decides some steps exactly. Of others, which the design leaves to the moment when they are noticed (changes
// in SOURCE directly) or which do not change bytes (times, names), only the Oracle judges: a Run that is Loose.
//
// Steps are total: a Step that makes no sense at its time (a store of a client that maps nothing) is left out by Check.
// So any part of a program is a program, which is what shrinking needs.
//
// # What the model decides where the design leaves freedom
//
//   - A collect carries every byte that the device has at that time, those not released yet too. Their release finds
//     nothing to publish afterwards, and nobody can tell.
//   - An overlap is a byte that both sides of a merge changed, to different values. It is counted when a device's bytes
//     come home. A byte that an acquire keeps because the device has an unreleased value of its own is counted by
//     nobody.
//   - Among the devices whose releases come home together the highest wins. A device that comes home later wins over
//     what came home before, whoever that was: nobody remembers who wrote a byte of home.
//   - A store of the value that the byte already had in the base is no change.
//   - Bytes past end of file belong to nobody: a device's program may store there, but they are never compared, never
//     brought home, and zero again when the file grows over them.
//   - A file that shrinks takes the bytes with it everywhere at once. A punched hole is a write of zeros by the CPU:
//     devices see it when they acquire.
//   - The kernel may hold a page since it read it or a program wrote the whole of it, until a release that publishes
//     the page had it dropped. A write of a part of a page, and a write-back, leave the kernel with what it had.
//   - A page drains from the publication of a release until the kernel dropped it. Collects leave it alone meanwhile,
//     but for a read request. If a program writes the whole page meanwhile, the kernel holds it again, without the
//     released bytes: it is dropped once more before the release returns.
//   - A program loads from a page of a lazy mapping only after it acquired it, as from a page after DONTNEED. It may
//     store into it before: the page is compared with zeros then, so that stores of zero are not found.
//   - Who maps a part of a file can look at all that the device has of it. So stale bytes go at every Map, or become
//     current where somebody uses them.
//   - A bracket changes nothing but that it may bring pages up to date, which in programs that are not Loose each does.
//     A movable mapping is as any other, but has nothing before its first bracket.
//   - With write-back caching, a write that makes the file longer is written back at once. The kernel may do that at
//     any time, and nothing has to be said about two sizes of a file.
package model
