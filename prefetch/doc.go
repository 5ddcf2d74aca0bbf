// Package prefetch decides what to read ahead: accesses go in, ranges of pages come out. It is pure: no I/O, no locks,
// no clock.
//
// # Model
//
// A Predictor watches the accesses of one file and knows pages, not handles: programs that share a file are told apart
// by where they read. It sees every access, those of pages that are there included, in any order. What it returns is a
// proposal: the caller leaves out what is there already, or is on its way, and need not fetch the rest. The caller says
// where the file ends (Resize), and which pages went unused (Unused).
//
// There are two to build with. Streams is for few programs that read in order: forward, backward or in strides, several
// of them in one file. Coverage is for massive threading, where hundreds of blocks read at once and no order is to be
// seen: it learns how much of the surroundings of a page is read once the page was. Device has both. Two others are
// what they are compared with: Kernel does as Linux's read-ahead, Tree as NVIDIA's driver for unified memory.
//
// Windows follow the GAIA thesis, section 4.2: at least 512 KiB for what is known to be sequential, at most 16 MiB.
//
// Package trace has a file format for recorded accesses, package replay scores predictors on them.
//
// # What it does not do
//
// It knows neither what is resident nor how long a fetch takes, and holds no bytes.
package prefetch
