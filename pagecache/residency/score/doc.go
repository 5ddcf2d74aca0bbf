// Package score replays a trace against device memory that is too small for it, and counts what each eviction rule
// costs.
//
// # The play
//
// Each device has its own memory, divided into extents of one size. Its programs access them in the order of the trace.
// An extent that is not in device memory moves in, or is accessed over the link; Placement decides. If it moves in and
// there is no room, the rule names what leaves. Changed extents are copied home, others are dropped. Accesses of CPU
// programs cost nothing and move nothing; rules hear of them if the extent is in device memory.
//
// # The bounds
//
// Belady evicts the extent whose next access is last. If all accessed extents move in, no rule has fewer moves. The
// best of many random runs approximates the best that any rule could do, as in GPUswap's evaluation (6.2). Unlike
// Belady's bound, it includes the cost of copies home.
//
// # The time
//
// Time is the sum of these: bytes accessed in device memory at its bandwidth, bytes moved or accessed remotely at the
// link's, and a fixed time per move for mapping and unmapping. Nothing overlaps. The sum compares rules; it does not
// predict run times.
package score
