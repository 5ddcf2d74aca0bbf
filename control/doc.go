// Package control is the daemon's side of the helper library: the socket, its wire format, and who may map what.
//
// # Model
//
// A program proves its right to a file with an open descriptor: an ioctl on the mount asks the Server for a grant,
// which is the path of the socket and a token of 16 random bytes. The token works once, for a short time, and only
// while the descriptor is open. On the socket, the client says HELLO and then sends requests. MAP redeems a token and
// makes a Mapping of the page cache; the mapping's extents of device memory go to the client as descriptors.
// docs/dev/protocol.md describes every frame. testdata/frames.txt has an example of each, which tests the daemon and
// the clients.
//
// A session is one connection. It ends when the client closes the socket, is killed or breaks the protocol. Then its
// mappings are unmapped, which is an implicit release: stores outlive the process that made them.
//
// From version 2 of the protocol on, a client may open a second connection, on which the daemon speaks first
// (service.go), and may send requests that are larger than a frame (large.go).
//
// # Bounds
//
// A session holds one buffer of maxRequest bytes, at most Options.MaxRequests running requests, and at most
// Options.MaxMappings mappings. Replies are not queued: each request's own goroutine writes its reply. A client that
// does not read for Options.WriteTimeout loses its connection. Nobody else waits for it, because sessions share no lock
// across I/O. There are also limits on all sessions of a user together, and a reserve for root and the user who mounted
// (users.go). What the requests of ordinary users keep beyond a frame each is counted before it is kept, and bounded
// (allowance.go).
//
// # Locks
//
//	session.writeMu    one frame is sent at a time; held across the write, with no other lock
//	session.mu         the session's mappings and request ids
//	Server.mu          the sessions
//	tokens.mu          grants not yet redeemed
//	service.mu         the notices that a client will get
//	allowance.mu       the bytes that users' requests keep
//
// No two of them are held at once.
//
// # Goroutines
//
// One goroutine accepts connections. Each session has one that reads, and one for each running request and each bracket
// that ends. A service connection has one that writes, and short ones that wait for answers. The Server owns all of
// them, and Close waits for them, including the implicit releases. Only goroutines that close descriptors of foreign
// files are on their own, because such a close may hang (large.go).
//
// # What it does not do
//
// It knows no FUSE: package fs answers the ioctl and calls Grant. It makes no decisions about coherence or memory:
// package pagecache does. It relies on the kernel's permission check at open, and checks no file permissions itself.
package control
