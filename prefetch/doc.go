// Package prefetch decides what to read ahead. Accesses go in, ranges of pages come out. It is pure: no I/O, no locks,
// no clock.
//
// # Model
//
// A Predictor watches the accesses of one file. It knows pages, not handles: it tells programs that share a file apart
// by where they read. It sees every access, in any order, including accesses to pages that are present. What it returns
// is a proposal: the caller omits pages that are present or on their way, and need not fetch the rest. The caller
// reports the end of the file (Resize) and pages that went unused (Unused).
//
// There are two basic predictors. Streams is for a few programs that read in order: forward, backward or in strides,
// several of them in one file. Coverage is for massive threading, when hundreds of blocks read at once in no visible
// order: it learns how much of a page's surroundings is read once the page was. Device combines both. Two others serve
// as comparisons: Kernel does what Linux's read-ahead does, Tree what NVIDIA's driver does for unified memory.
//
// Windows follow the GAIA thesis, section 4.2: at least 512 KiB for accesses known to be sequential, at most 16 MiB.
//
// Package trace has a file format for recorded accesses. Package replay scores predictors on such traces.
//
// # What it does not do
//
// It does not know what is resident or how long a fetch takes, and it holds no bytes.
package prefetch
