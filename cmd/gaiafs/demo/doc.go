// Package demo is gaiafs's main job in small: a CPU program and a device program write one picture together.
//
// # Model
//
// Photographs are laid out on a slide, and the slide is photographed in overlapping tiles, as a microscope does. The
// tiles lie as files on a fresh mount. Two processes stitch them: they blend the tiles where they overlap, sharpen the
// result, and store it into one output file on the mount. The CPU program stores the left half of every row through
// an ordinary mmap; the device program stores the right half into device memory through the client library. A row is
// a few pages long and its middle lies inside a page, so in every row there is a page that both write at once.
//
// The same code then stitches the same tiles in one process and in plain memory, and every byte of the output file is
// compared with that: read through the mount, and read from the backing file after the unmount.
//
// The arithmetic is in integers, so the result does not depend on the machine.
//
// # What it does not do
//
// It neither mounts nor starts programs on its own: Options says how. It knows no flags.
package demo
