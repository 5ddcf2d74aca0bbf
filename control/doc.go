// Package control is the daemon's side of the helper library: the socket, its wire format, and who may map what.
//
// # Model
//
// A program proves its right to a file with an open descriptor of it: an ioctl on the mount asks the Server for a
// grant, which is the path of the socket and a token of 16 random bytes. The token works once, for a short time, and
// only while the descriptor is open. On the socket the client says HELLO and then sends requests; MAP redeems a token
// and makes a Mapping of the page cache, and the extents of device memory behind it travel back as descriptors. The
// bytes of every frame are in docs/dev/protocol.md, and testdata/frames.txt has an example of each that the daemon and
// the clients are tested against.
//
// A session is one connection. When it ends, by UNMAP of everything, a closed socket, a killed client or a protocol
// error, its mappings are unmapped, which is an implicit release: stores outlive the process that made them.
//
// From version 2 of the protocol on, a client may have a second connection, on which the daemon speaks first
// (service.go), and send requests that are larger than a frame (large.go).
//
// # Bounds
//
// A session holds one buffer of maxRequest bytes, at most Options.MaxRequests running requests and at most
// Options.MaxMappings mappings. Nothing is queued for a client: a request's own goroutine writes the reply, and a
// client that does not read for Options.WriteTimeout loses its connection. Nobody else waits for it, since sessions
// share no lock across I/O. A user's sessions together have limits too, and root and the user who mounted a reserve
// (users.go).
//
// # Locks
//
//	session.writeMu    one frame at a time goes out; held across the write, never with another lock
//	session.mu         the session's mappings and request ids
//	Server.mu          the sessions
//	tokens.mu          grants not yet redeemed
//	service.mu         what a client is to be told
//	user.large         the long body of a request of the user, while it is read and decoded
//
// No two of them are held at once, but that user.large is held while others are taken.
//
// # Goroutines
//
// One accepts; each session has one that reads and one for each running request, and a service connection one that
// writes. The Server owns all of them and Close waits for them, the implicit releases included.
//
// # What it does not do
//
// It knows no FUSE: package fs answers the ioctl and calls Grant. It decides nothing about coherence or memory; that
// is package pagecache. It trusts the kernel's permission check at open and makes none of its own on files.
package control
