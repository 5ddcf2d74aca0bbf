// Package mover carries out the transfers between home, the host and the devices.
//
// It is told what bytes go from where to where and for what (Class), and knows neither files nor the rules of
// coherence. Each Device has a schedule.Discipline, which decides when a transfer begins; a Device alone makes the
// calls of its gpubackend.Device that move bytes.
//
// # Transfers
//
// There are three ways to ask. In, Out, Peer, Patch and Zero are made by the caller, who waits: the request is Own for
// the schedule, and the call of the device begins when its turn has come. A Read is a copy for the host that goes into
// a queue: the Device makes the call, together with others, and whoever waits for it may stop waiting.
//
// The states of an own transfer:
//
//	waits ──turn──▶ under way ──▶ ended
//	  │
//	  └─ctx ends──▶ not begun: the error is that of the context, and no byte has moved
//
// Where the discipline asks for pieces, a transfer is made in several calls, each with a turn of its own; the next one
// is in the row while one is made. The discipline may change meanwhile (SetOrder).
//
// From its turn on, it ends when the call of the device does. The context reaches that call, which may stop between
// pieces: after its error any of the bytes may have moved, or none. The buffers and the memory are the caller's before
// and after, and the call's in between.
//
// The states of a Read:
//
//	made ──Start──▶ waits ──▶ under way ──▶ ended
//	  │               │           │
//	  │               │           └─Wait gives up──▶ given up ──▶ ended, and nobody looks
//	  │               └─Wait gives up──▶ never begins
//	  └─Start, after Close──▶ never begins
//
// A Read holds on to its memory (Free) from Start until its call has ended or it is sure that none begins. Its buffer
// belongs to the Device until Done is closed, then to whoever waited, up to Finish. After it was given up nobody may
// look at it any more. Start reports false, and Wait does, where the bytes will not come; both have cleaned up then, or
// will.
//
// A Fill brings updates from home to a device: workers read pieces into buffers, and whoever finds enough of them read
// gives them to the device (In, Patch) himself. The caller of Run is one of the workers. The states of a Piece:
//
//	waits ──taken by a worker──▶ read ──▶ ready ──▶ sent ──▶ arrived (Done)
//	  │                           │                  │
//	  └─ctx ends, Until, Lacks    └─home fails       └─the device fails
//	     not begun                   not begun          anything may be in its pages
//
// A Target says where the bytes of a piece go: anywhere in the device's memory. Bytes that come together there are
// moved together on the host, since a copy costs the device the same however little it has.
//
// Pieces are taken in order. After an error none is taken, and those that workers have are carried to their end. When
// Run returns no worker has a piece, and no buffer belongs to the Fill: nothing is under way but Reads.
//
// Fills of one file share what they read where their Targets are Sharers: pieces are claimed before their reads begin,
// some at a time, and what was read is handed to each Fill that wants it, which sends it along with its own. Pieces
// then have the states
//
//	waits ──claimed──▶ read ──▶ handed to others, ready ──▶ sent ──▶ arrived
//	  │         └─home fails, Run ends──▶ others are told, and read it themselves
//	  └─another Fill has claimed all of it: nothing is left to do
//
// No Fill waits for another one's device. It waits for what others have begun to read for it, as for its own reads.
//
// A Fill of much has Relays besides the own link: other devices that are idle, over whose links bytes come into staging
// memory there, and from there to the device. A relay belongs to one sender from the copy into the staging memory until
// the copy out of it has ended. What it does not bring goes over the own link.
//
// Where home can be read past the host's page cache, and the Fill has an end (Until), nobody waits for the disk in Run.
// The pieces that lack are read beside it (Reads), and a later Fill takes them. The states of such a read:
//
//	goes on ──▶ arrived ──▶ taken by a Fill, with its buffer
//	   │  ▲        │
//	   │  │        └─Leave, Forget, Spans──▶ its buffer is given back
//	   │  └── Spoil: home changed. Spans gives it up, and says where
//	   └─Leave, Forget, Spans──▶ dropped ──▶ ends, and gives its buffer back
//
// # Locks
//
//	Fill.mu       which pieces are taken, read and sent; home is asked under it what the host's page cache has, and a
//	              Sharer for claims
//	  inbox.mu    what others read for a Fill; under their Fill.mu, too
//	Device.mu     what waits and what is under way
//	  Place.mu    what is known of the speed of a device, or of the disk
//
// No lock is held while a device is called, or a function of the caller but Sharer.Claim. The mover takes no lock of
// its callers; they may hold theirs.
//
// # What it does not do
//
// It does not say which bytes are right: whoever asks for a copy of memory that others store into gets what was there.
// It retries nothing.
package mover
