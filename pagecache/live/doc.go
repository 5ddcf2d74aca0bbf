// Package live shows watchers what a mount does, as it happens.
//
// # Model
//
// A Feed gets an Event from each part of the mount that does something: package fs for requests of the kernel, package
// control for requests of clients, package mover for transfers. It gives the Event to each Watch whose Filter accepts
// it. Senders do not wait: a Watch has room for a fixed number of events, and counts those that did not fit.
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
// It does not know who may see what: package control leaves out the events and names that a watcher may not see.
package live
