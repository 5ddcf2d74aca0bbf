// Package hungfs is a FUSE filesystem whose server stops answering when a test says so. Tests mount it below SOURCE, or
// as SOURCE.
//
// # Model
//
// It shows another directory. The server is a separate process, the test binary started again, so a request that hangs
// blocks no thread of the test. Mount starts the server. After Hang, the named kinds of requests get no answer. Wait
// returns when such requests have arrived. Fail makes writes and fsync fail. Answer makes all of them go on. When the
// test ends, the server is killed, and the kernel fails the requests that still wait.
//
// # What it does not do
//
// The kernel caches no names and no attributes of it, so every use of a file is a request.
package hungfs
