// Package residency owns the memory of devices that caches files: who has how much of it, where it is, who uses it, and
// what goes when more is needed than there is.
//
// # Model
//
// A Device has Extents: each caches a range of pages of one file, for one Key. A Key is what one device holds of one
// file; package pagecache implements it. This package knows neither what the bytes are, nor whether they are anywhere
// else: it asks the Key to Clean an extent that is to go, and the Key lets go of it (Leave) when nothing would be lost.
//
// Reserve is the only way to get memory. It gives a client all the extents of a range, pinned, or nothing. Whose
// extents make room is up to a tenants.Ledger, and which of them to a policy.Rule.
//
// # Ownership
//
// An Extent is used by its Key, from when it is placed until Leave; by every Pin, which a client's mapping has; and by
// whoever copies from or to it without the Key's lock (Hold, LetGo). The last user frees the memory. A Key may use the
// memory of its extents under its own lock without counting, since nobody but the Key calls Leave.
//
// The programs of each user are charged for what they map: an extent counts once for each user, however many of the
// user's programs map it.
//
// # States of an extent
//
//	made      it has memory; nobody knows of it but Reserve, which zeroes it, or Grant
//	idle      its Key has it, and nobody maps it: a victim for the policy
//	mapped    its Key has it, and so have clients' Pins
//	left      its Key let go of it; the memory stays for those who still use it
//	freed     nobody uses it
//
// The transitions, and who makes them:
//
//	made   → mapped   Reserve, for the client that asked. Its placement becomes TierVRAM
//	made   → freed    Reserve, where zeroing fails
//	idle   → mapped   Reserve
//	mapped → idle     Pin.Free, of the last one
//	idle   → left     Leave: the extent is evicted, or its file is gone
//	mapped → left     Leave of a lost device; or Reserve, where the Key got other memory for these pages meanwhile
//	left   → freed    Pin.Free or LetGo, of the last user. Its placement becomes TierNone
//	idle   → idle     Move: its bytes are in other memory. Its placement becomes TierHost, or TierVRAM again
//
// # Placements
//
// Where an extent's bytes live is its Placement: memory of the device's own, or pinned memory of the host. One function
// changes it (Extent.place), counts the generations, and tells every Pin that asked (Pin.Watch). An extent that has a
// Pin does not move. The Key sees to it that no client stores into one without: package pagecache takes it back from
// clients whose mappings are movable before it Cleans or Rehouses it.
//
// Pinned memory is one pool of all devices of a mount (Pinned), bounded, made on demand, and kept for the next extent
// when it is given back. Whoever needs room in it has extents of any device leave, without that device's turn. While a
// user may still have some of it mapped, no other user gets that.
//
// # Grants
//
// Grant is Reserve for a bracket: for ranges of several Keys, all or nothing. It takes the device's own memory, for
// which idle extents go, and pinned memory for the rest. What another tenant left on the device moves there, too, where
// the one who asks may own no more. Only where that is full too does it wait for other Grants to end, in a line, first
// come first served; whoever waits holds nothing. Somebody who has a Grant already and would have to wait for another
// one is refused instead. So Grants cannot wait for each other in a circle.
//
// What leaves for a Grant leaves its memory to it, unless others may have that still, or kernels of a client that was
// killed (stock.go). Nothing that a Grant makes is zeroed: the Key is told (Littered), and zeroes what nobody brings
// before a client has the memory.
//
// Memory that becomes free is given back in batches (Back): what nobody uses in pinned memory moves to the device's
// own, of the tenant that owns least by its share first.
//
// # Making room
//
// Reserve tries to allocate before it evicts. Where there is no room, reservations of one device take turns, in the
// order in which they came; a device's turns have nothing to do with another device's. Whoever has the turn asks Keys
// to clean victims, one after another, and waits for memory that is about to be free. Victims of a Grant leave at once,
// as many as it needs: their clients are waited for together. What has the turn made free is kept for it: a reservation
// that comes meanwhile is served at once only if there is room for both. So one that needs little does not wait for one
// that waits for a slow disk, and one that needs much is not starved by many that need little. Nobody takes mapped
// memory from anybody, and a reservation that fails gives back all it got, so no two of them wait for each other.
//
// # Pinned files
//
// A Key may be pinned, on some user's account. Its extents are no victims then, but those of a limited user only as far
// as his share goes, the oldest ones first. Which these are is found out when a victim is looked for (pinned.go has the
// host's memory, stay.go this). Explicit eviction, and the loss of rights or of the device, do not ask.
//
// # Sizes
//
// The size of new extents follows from the size of the file at that moment (Size). Extents that are there stay as they
// are, since clients may map them; new ones fill the gaps between them with the largest aligned blocks that fit
// (size.go). So a file that was mapped while it was small has a few small extents where it begins, and large ones for
// the rest.
//
// # Locks
//
// Device.budgeting is held while the budget changes, or what is guaranteed of it, and comes before Device.mu. Who sets
// tenants holds that of all devices, in the order of the cache. Device.mu is held while nobody waits:
// never while a Key, a watcher or the device is called, but for Key.Pinned, which takes no lock. Who looks for a victim
// looks at every extent under it. Pinned.mu comes after it, and is a leaf. A Key may hold its own lock when it calls
// this package, but for Reserve, Grant, Evict and Back, which call Keys.
//
// # What it does not do
//
// It does no I/O but on devices, knows no clients, and starts no goroutine.
package residency
