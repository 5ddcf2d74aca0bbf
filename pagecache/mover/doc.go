// Package mover carries out the transfers between home, the host and the devices.
//
// The caller says which bytes go from where to where, and what for (Class). The mover knows neither files nor the rules
// of coherence. Each Device has a schedule.Discipline, which decides when a transfer begins. Only the Device makes
// calls of its gpubackend.Device that move bytes.
//
// # Transfers
//
// There are three kinds of transfers. The caller of In, Out, Peer, Patch or Zero makes the device's call itself: it
// waits, its request is Own for the schedule, and the call begins when its turn has come. A Read is a copy to the host
// that goes into a queue: the Device makes the call, together with others, and a caller may stop waiting for it. A Fill
// brings pieces of home to a device.
//
// The states of an own transfer:
//
//	waits ──turn──▶ under way ──▶ ended
//	  │
//	  └─ctx ends──▶ not begun: the error is that of the context, and no byte has moved
//
// If the discipline asks for pieces, a transfer is made in several calls, each with its own turn. As many of them queue
// or are in progress at once as may be in flight. The discipline may change meanwhile (SetOrder).
//
// After its turn, the transfer ends when the device's call ends. The context reaches that call, which may stop between
// pieces: after an error, any of the bytes may have moved. The buffers and the memory belong to the call while it runs,
// and to the caller before and after.
//
// The states of a Read:
//
//	made ──Start──▶ waits ──▶ under way ──▶ ended
//	  │               │           │
//	  │               │           └─Wait gives up──▶ given up ──▶ ended, and nobody looks
//	  │               └─Wait gives up──▶ never begins
//	  └─Start, after Close──▶ never begins
//
// A Read keeps its memory in use until free is called: when its call has ended, or when it is certain that none begins.
// Its buffer belongs to the Device until Done is closed, and then to the caller until Finish. After the caller gave up,
// nobody may look at the buffer. If Start or Wait reports false, the bytes will not come; the Read cleans up by itself.
//
// A Fill brings updates from home to a device. Workers read pieces into buffers. A worker that finds enough of them
// read gives them to the device itself (In, Patch). The caller of Run is one of the workers. The states of a Piece:
//
//	waits ──taken by a worker──▶ read ──▶ ready ──▶ sent ──▶ arrived (Done)
//	  │                           │                  │
//	  └─ctx ends, Until, Lacks    └─home fails       └─the device fails
//	     not begun                   not begun          anything may be in its pages
//
// A Target says where in the device's memory the bytes of a piece go. Rows at equal distances are one copy, straight
// from the buffer. If there are many copies, those that are adjacent on the device are first joined on the host,
// because every copy costs the device the same, however small.
//
// Pieces are taken in order. After an error no more are taken, and workers finish those that they have. When Run
// returns, no worker has a piece and the Fill uses no buffer. Only Reads may still be in progress, and other Fills may
// still send shares.
//
// Fills of one file share what they read if their Targets are Sharers. They claim pieces before they read them, a few
// at a time. What was read is handed to each Fill that wants it, which sends it along with its own pieces. Pieces then
// have these states:
//
//	waits ──claimed──▶ read ──▶ handed to others, ready ──▶ sent ──▶ arrived
//	  │         └─home fails, Run ends──▶ others are told, and read it themselves
//	  └─another Fill has claimed all of it: nothing is left to do
//
// The pieces that are handed out use the buffer that the Fill read into:
//
//	read ──handed out──▶ lent: nobody changes its bytes ──the last piece was sent, or gathered elsewhere──▶ given back
//
// It belongs to all these pieces, so it may outlive the Run and the Device that it came from. Every device copies from
// it. The memory that waits for a Fill is limited (mostInbox).
//
// No Fill waits for another Fill's device if that is stuck. If it is only behind, readers wait for a part of their
// time, so that what they read is not read again (paceLocked). A Fill waits for reads that others have begun for it, as
// for its own reads.
//
// A large Fill has Relays besides its device's own link: other, idle devices. Bytes go over a relay's link into staging
// memory there, and from there to the device. One sender has the relay from the copy into the staging memory until the
// copy out of it has ended. What a relay fails to bring goes over the own link.
//
// If home can be read past the host's page cache, and the Fill has a deadline (Until), Run does not wait for the disk.
// Missing pieces are read in the background (Reads), and a later Fill takes them. The states of such a read:
//
//	goes on ──▶ arrived ──▶ taken by a Fill, with its buffer
//	   │  ▲        │
//	   │  │        └─Leave, Forget, Spans──▶ its buffer is given back
//	   │  └── Spoil: home changed. Spans gives it up, and says where
//	   └─Leave, Forget, Spans──▶ dropped ──▶ ends, and gives its buffer back
//
// # Locks
//
//	Fill.mu       which pieces are taken, read and sent. Under it home is asked what the host's page cache has
//	  Fill.claimMu
//	              what the Fill claims. Mostly taken without Fill.mu; a Sharer is asked under it
//	    inbox.mu  what others read for a Fill; also taken under their claimMu
//	  ColdFile.mu what reads through the host's page cache brought there; home is asked under it, too
//	transfer.mu   which pieces of one transfer have begun
//	  Device.mu   what waits and what is in progress
//	    Place.mu  the measured speed of a device or of the disk
//
// No lock is held while a device moves bytes, or while a function of the caller runs, except Sharer.Claim. The mover
// takes no lock of its callers; callers may hold their own.
//
// # What it does not do
//
// It does not know which bytes are right: a copy of memory that others store into gets whatever was there. It retries
// nothing.
package mover
