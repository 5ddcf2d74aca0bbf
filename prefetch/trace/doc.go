// Package trace has the format of recorded accesses, described in docs/trace.md. An Encoder turns accesses into bytes
// as they come. Read turns the bytes into a Trace.
//
// A file begins with a header, which has the version, followed by blocks, each with its checksum. The last block ends
// with the number of events. So a truncated file is recognised wherever it was cut.
//
// The package opens no files and has no clock: callers say when an access was.
package trace
