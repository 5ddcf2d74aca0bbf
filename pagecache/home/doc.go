// Package home reads and writes the home of a file: its backing file.
//
// # Model
//
// A Home belongs to one file. It has the Backing, the open backing file, and
//
//   - the reads that run without the file's lock. A Backing is closed when none is under way (reads.go);
//   - the size after the mount's last change, and how many direct changes in SOURCE have been looked at;
//   - the times that programs are shown while released bytes are written (times.go);
//   - how home is written: by several cores, in steps, and with a look at direct changes before each (write.go).
//
// Only this package asks which of its optional interfaces a Backing has.
//
// # Locks
//
// The file's lock guards a Home. Its methods are called with that lock held, unless they say otherwise. It may be held
// across I/O on home. Home.readsMu counts reads, and is a leaf except that a Backing may be closed under it.
//
// # What it does not do
//
// It knows no devices and no rules of coherence. Flights, which are laid over the backing file, and locked pages are
// still in package pagecache.
package home
