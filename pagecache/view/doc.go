// Package view computes where the bytes of a view are: in the files, and in the view. It does no I/O. A Layout has no
// locks; a State has one of its own, a leaf.
//
// # Layout
//
// A view is read-only memory that holds chosen bytes of files, packed at an alignment. It is made of segments. A
// Segment is a number of rows of one file; the stride is the distance from one row's start to the next. In the view,
// the rows of a segment follow each other without gaps. The first segment begins at 0, and each other one at the next
// multiple of the alignment. Bytes of the view that are in no row are zero, and so are bytes past the end of a file.
// Segments may overlap, repeat each other, come in any order, begin and end inside a page, and reach past end of file.
//
// Clients compute the starts of segments by the same rule, which is in docs/dev/protocol.md.
//
// # Indexes
//
// A Layout answers two questions. To which bytes of the view do the pages of a range of a file go (File.Runs)? And from
// which pages of the files do bytes of the view come (Layout.Sources)? Both take time in proportion to the logarithm of
// the number of segments and to the length of the answer.
//
// # State
//
// A State says which pages of a file changed since they were copied, and which are being copied. It may report too many
// pages as changed, never too few.
package view
