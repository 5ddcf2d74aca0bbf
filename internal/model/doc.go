// Package model defines what gaiafs must do, as a small, slow, obvious program. It also makes random programs with
// which the real system is checked. Only tests import it.
//
// # Model
//
// A Model is one file of a few pages, the kernel's copies of its pages, and the replicas of a few devices. It is the
// naive design: every replica has a full copy of its own base, version vectors are maps, merging is a loop over bytes.
// It shares no code with packages lrc and pagecache. Do carries out one Step and returns what a read or load returns.
//
// A System is anything that carries out Steps. Check runs a program on a System and on the Model side by side, and
// reports the first difference. An Oracle knows nothing of homes, bases and versions. From the order of stores,
// releases and acquires alone, it says which values a read may return. So it finds mistakes that Model and System
// share.
//
// The Model predicts some steps exactly. Others are judged by the Oracle only, in a Run that is Loose: changes made
// directly in SOURCE, which may be noticed at various moments, and steps that change no bytes (times, names).
//
// Steps are total: Check leaves out a Step that makes no sense at its time (a store of a client that maps nothing). So
// any part of a program is a program, which shrinking needs.
//
// # What the model decides if the design leaves freedom
//
//   - A collect carries all bytes that the device has at that time, including unreleased ones. Their release then finds
//     nothing to publish, and no program can tell the difference.
//   - An overlap is a byte that both sides of a merge changed, to different values. It is counted when a device's bytes
//     come home. A byte that an acquire keeps, because the device has an unreleased value of its own, is not counted.
//   - If the releases of several devices come home together, the highest device wins. A device whose bytes come home
//     later
//     wins over all that came before, because home does not record who wrote a byte.
//   - A store of the value that the byte has in the base is no change.
//   - Bytes past end of file belong to no program. A device's program may store there, but these bytes are never
//     compared
//     and never brought home, and are zero again when the file grows over them.
//   - A file that shrinks loses the bytes everywhere at once. A punched hole is a write of zeros by the CPU: devices
//     see it
//     when they acquire.
//   - The kernel may hold a page from the time when it read the page, or a program wrote all of it, until a release
//     that
//     publishes the page had it dropped. A partial write of a page, and a write-back, do not change what the kernel
//     holds.
//   - A page drains from the publication of a release until the kernel has dropped it. Collects leave it alone in that
//     time,
//     except for a read request. If a program writes the whole page in that time, the kernel holds it again, without
//     the released bytes. Then it is dropped once more before the release returns.
//   - A program loads from a page of a lazy mapping, or from a page after DONTNEED, only after it acquired the page. It
//     may
//     store into the page before. The page is then compared with zeros, so stores of zero are not found.
//   - A client that maps a part of a file can look at everything that the device has of the file. So at every Map,
//     stale
//     bytes are removed, or made current if another client uses them.
//   - A bracket may bring pages up to date; in programs that are not Loose it always does. It changes nothing else. A
//     movable mapping is like any other, but has no memory before its first bracket.
//   - With write-back caching, a write that makes the file longer is written back at once. The kernel may do that at
//     any
//     time, and the model needs only one size of the file.
package model
