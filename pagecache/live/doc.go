// Package live shows what a mount does, as it happens, to those who watch.
//
// # Model
//
// A Feed gets an Event from whoever carried something out: package fs for requests of the kernel, package control for
// those of clients, package mover for transfers. It gives them to each Watch whose Filter they pass. Nobody who sends
// waits: a Watch has room for so many events, and counts those that came when there was none.
//
// While nobody watches, On is one atomic load, and senders make no Event.
//
// # Locks
//
//	Watch.mu   the events that wait to be taken: a leaf, held for a few instructions
//	Feed.mu    the list of watches, while it is replaced
//
// # What it does not do
//
// It does not know who may be told what: package control leaves out the events and names that a watcher may not know.
package live
