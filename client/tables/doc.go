// Command tables writes what several languages have in common into each of them: go generate ./client/tables.
//
// cuda_errors.txt is the table of the results of libcuda, and kinds.txt that of the kinds of devices, which the daemon
// shares with the client libraries.
package main

//go:generate go run .
