// Package score plays a trace against the memory of devices that is too small for it, and counts what each rule for
// evictions comes to.
//
// # The play
//
// Each device has its own memory, of which extents take a fixed size. The accesses of its programs come in the order of
// the trace. An extent that is not there moves in, or is accessed where it is, over the link: Placement says which.
// When it moves in and there is no room, the rule names what goes; changed extents are copied home, others are dropped.
// Accesses of CPU programs cost nothing and move nothing. Rules hear of them where the extent is there.
//
// # The bounds
//
// Belady evicts what is accessed latest in the future: no rule has fewer moves, if all extents that are accessed move
// in. The best of many runs of chance approximates the best that any rule could come to, as GPUswap's evaluation does
// (6.2); unlike Belady's it counts what copies home cost.
//
// # The time
//
// Time is the sum of what accesses take: bytes that are there at the bandwidth of device memory, bytes that move or are
// accessed remotely at that of the link, and a fixed time for each move, for mapping and unmapping. Nothing overlaps:
// it compares rules, and forecasts nothing.
package score
