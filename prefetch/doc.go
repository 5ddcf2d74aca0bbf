// Package prefetch decides what to read ahead: an access stream goes in, hints come out. It is pure: no I/O, no locks, no
// clock. A Stream watches one mapping; the windows follow the GAIA thesis, section 4.2: at least 512 KiB for streams
// known to be sequential, at most 16 MiB, doubled with every access that continues the stream.
package prefetch
