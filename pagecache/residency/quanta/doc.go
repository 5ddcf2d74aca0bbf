// Package quanta lets the programs of one tenant use a device by turns when their memory does not fit together.
//
// It is pure: no clock, no lock. Package residency tells it what brackets do, and asks it who may take whose memory.
//
// # Why
//
// Programs that go through their files again and again take each other's memory just before it is needed again. Then
// nearly every bracket moves its memory first, or uses pinned memory, whatever the eviction rule. A program that may
// keep for a while what it has brought uses it several times.
//
// # Rules
//
// A client has a quantum from the first bracket for which it may take others' memory. It first brings its memory, until
// it has asked for none for Grace. It then keeps its memory for keeps times the time that bringing took. A quantum ends
// after Quanta.Longest in any case. Until then, other clients of the tenant take none of its memory. One client brings
// its memory at a time; with several, none would get all of its own.
//
// Clients wait for a quantum in order of arrival, and only if they are hungry: their brackets need memory again sooner
// than moving that takes. A program that pauses for longer would gain little, and would keep memory that others could
// use. A client that has no bracket for Grace, and asks for none, gives its quantum up. A client that brings memory for
// more than half of a quantum, because it uses more than there is or uses it only once, gets none for a while.
//
// # What it does not do
//
// It knows no extents, and chooses no victims. It does not share memory among tenants; package tenants does.
package quanta
