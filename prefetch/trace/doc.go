// Package trace has the format of recorded accesses, which docs/trace.md describes: an Encoder turns accesses into
// bytes as they come, Read turns the bytes into a Trace.
//
// A file begins with a header, which has the version, and goes on with blocks, each with its checksum. The last block
// ends with a count of the accesses, so that a file that was cut short is known from a whole one wherever it was cut.
//
// The package opens no files and keeps no time: callers say when an access was.
package trace
