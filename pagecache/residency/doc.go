// Package residency manages the memory of devices that cache files: who has how much of it, where it is, who uses it,
// and which extents are evicted when there is not enough.
//
// # Model
//
// A Device has Extents. Each caches a range of pages of one file, for one Key. A Key is what one device holds of one
// file; package pagecache implements it. This package does not know what the bytes are, nor whether other copies exist.
// To evict an extent it asks the Key to Clean it. The Key lets go of the extent (Leave) when nothing would be lost.
//
// Only Reserve and Grant make extents. Reserve pins all extents of a range for a client, or none. It zeroes new ones,
// or leaves that to whoever needs an extent first (Request.Unzeroed, Extent.Zero). A tenants.Ledger decides whose
// extents make room, and a policy.Rule which of them.
//
// # Ownership
//
// An Extent has these users: its Key, from when the extent is placed until Leave; every Pin, which a client's mapping
// has; and every copy from or to it that runs without the Key's lock (Hold, LetGo). The last user frees the memory. A
// Key may use its extents under its own lock without counting, because only the Key calls Leave.
//
// Each user is charged for what that user's programs map. An extent counts once for each user, however many of the
// user's programs map it.
//
// # States of an extent
//
//	made      it has memory; only Reserve, which zeroes it unless that is done later, or Grant knows it
//	idle      its Key has it, and nobody maps it: it may be evicted
//	mapped    its Key has it, and so have clients' Pins
//	left      its Key let go of it; the memory stays for its remaining users
//	freed     nobody uses it, and it has no memory
//
// The transitions, and who makes them:
//
//	made   → mapped   Reserve, for the client that asked. Its placement becomes TierVRAM
//	made   → freed    Reserve, if zeroing fails
//	idle   → mapped   Reserve
//	mapped → idle     Pin.Free of the last Pin
//	idle   → left     Leave: the extent is evicted, or its file is gone
//	mapped → left     Leave, if the device is lost; or Reserve, if the Key has got other memory for these pages
//	left   → freed    Pin.Free or LetGo by the last user. Its placement becomes TierNone
//	idle   → idle     Move to other memory. Its placement becomes TierHost, or TierVRAM again
//
// # Placements
//
// The Placement of an extent says where its bytes are: in the device's own memory, or in pinned host memory. One
// function changes it (Extent.place), counts the generations, and tells every Pin that asked (Pin.Watch). An extent
// that has a Pin does not move. The Key makes sure that no client stores into an extent without a Pin: package
// pagecache takes extents back from clients with movable mappings before it Cleans or Rehouses them.
//
// Pinned memory is one pool for all devices of a mount (Pinned). It is bounded, made on demand and ahead of need
// (ahead.go), and kept for the next extent when it is given back. A reservation that needs room in it evicts extents of
// any device, without that device's turn. While a user may still have some pinned memory mapped, no other user gets it.
//
// # Grants
//
// Grant is Reserve for a bracket: for ranges of several Keys, all or nothing. It evicts idle extents to get the
// device's own memory, and uses pinned memory for the rest. If the tenant may not own more of the device, extents on
// the device that it would take over from another tenant move to pinned memory, too. Only if pinned memory is full as
// well does a Grant wait for other Grants to end, first come, first served. It holds nothing while it waits. A caller
// that holds a Grant already is refused instead of waiting for another one. So Grants cannot deadlock.
//
// With a threshold (delay.go and policy.Threshold), extents that were not accessed often enough stay in pinned memory,
// or get some. If pinned memory is full, they get the device's own.
//
// A Grant takes over the memory of its victims, unless other users may still have it mapped, or kernels of a killed
// client may still store into it (stock.go). Grant does not zero this memory. Instead the Key learns that it is
// Littered, and zeroes what is not filled before a client gets the memory.
//
// Free memory is used in batches (Back): idle extents in pinned memory move to the device's own memory, beginning with
// the tenant that owns least relative to its share.
//
// # Making room
//
// Reserve tries to allocate before it evicts. If there is no room, the reservations of one device take turns, in order
// of arrival; each device has its own turns. The reservation that has the turn asks Keys to clean victims, one after
// another, and waits for memory that is about to be free. The victims of a Grant are cleaned at once, as many as it
// needs, to wait for all their clients together. Memory that was freed for the turn's holder is kept for it: a later
// reservation is served at once only if there is room for both. So a small reservation does not wait for one that waits
// for a slow disk, and many small ones do not starve a large one. Nobody takes mapped memory away, and a reservation
// that fails gives back all it got. So reservations cannot deadlock.
//
// # Pinned files
//
// A Key may be pinned, on some user's account. Its extents are no victims then; a limited user's pins count only up to
// the user's share, the oldest extents first. That is computed when a victim is chosen (stay.go; pinned.go is about
// pinned host memory). Explicit eviction, lost rights and a lost device ignore pins.
//
// The pages of a file that is pinned on the host are in the host's page cache, not in extents. This package only counts
// them as pinned memory, for each user (lockedfiles.go). Nothing evicts them; extents get what they leave. Pages of hot
// files, which are locked without a pin, are counted apart.
//
// # Sizes
//
// The size of new extents follows from the size of the file at that moment (Size). Existing extents do not change,
// because clients may map them. New ones fill the gaps with the largest aligned blocks that fit (size.go). So a file
// that was mapped while it was small has a few small extents at its start, and large ones after that.
//
// # Locks
//
// Device.budgeting is held while the budget or the guarantees change, and comes before Device.mu. SetTenants holds that
// of all devices, in the order of the cache. Device.mu is never held while a Key, a watcher or the device is called, so
// nobody blocks under it. The exceptions are Key.Pinned and Key.Preference, which take no lock. The search for a victim
// looks at every extent under Device.mu. Pinned.mu comes after Device.mu and is a leaf. A caller may hold a Key's lock,
// except when it calls Reserve, Grant, Keep, Back, Trim, SetBudget or Follow: these call Keys.
//
// # What it does not do
//
// It does no I/O except on devices, knows no clients, and starts no goroutine that outlives a call. Whoever owns a
// Device calls Ahead when Expected says so.
package residency
