// Command tables writes tables that several languages share into a source file of each: go generate ./client/tables.
//
// cuda_errors.txt lists the results of libcuda. kinds.txt lists the kinds of devices; the daemon and the client
// libraries share it.
package main

//go:generate go run .
