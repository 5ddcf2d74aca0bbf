// Package demo shows gaiafs's main purpose on a small scale: a CPU program and a device program write one picture
// together.
//
// # Model
//
// Photographs are laid out on a slide, and the slide is cut into overlapping tiles, as a microscope camera does. The
// tiles are files on a fresh mount. Two processes stitch them: they blend the tiles where they overlap, sharpen the
// result, and store it in one output file on the mount. The CPU program stores the left half of every row through an
// ordinary mmap; the device program stores the right half into device memory through the client library. A row is a few
// pages long and its middle lies inside a page, so in every row both programs write one common page at once.
//
// The same code then stitches the same tiles in one process and in plain memory. The demo compares every byte of the
// output file with that, first through the mount, and after the unmount in the backing file.
//
// The arithmetic uses integers, so the result is the same on every machine.
//
// # What it does not do
//
// It does not mount or start programs by itself: Options provides both. It knows no flags.
package demo
