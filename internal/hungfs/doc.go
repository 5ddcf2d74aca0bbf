// Package hungfs is a FUSE filesystem whose server stops answering when a test says so. Tests mount it below SOURCE, or
// as SOURCE.
//
// # Model
//
// It shows another directory. The server is a process of its own, the test binary started again, so that a request
// that hangs stops no thread of the test. Mount starts it. Hang names kinds of requests that get no answer from then
// on, and Wait returns once such a request has arrived. Fail has writes fail. Answer lets all of them go on. At the
// end of the test the server is killed, upon which the kernel fails whatever still waits.
//
// # What it does not do
//
// The kernel keeps no names and no attributes of it, so every use of a file is a request.
package hungfs
