// Command tables writes what the client libraries have in common into each of them, in its language: go generate ./client/tables.
// cuda_errors.txt is the table of the results of libcuda.
package main

//go:generate go run .
