// Package view says where the bytes of a view are: in the files, and in the view. It does no I/O and has no locks.
//
// # Layout
//
// A view is read-only memory that holds chosen bytes of files, packed at an alignment. It is made of segments. A
// Segment is a number of rows of one file, each as far behind the one before it as its stride says. In the view, the
// rows of a segment follow each other without gaps. Each segment begins at the next multiple of the alignment, and the
// first one at
// 0. What no row has is zero, and so is what lies past the end of a file. Segments may overlap, repeat each other, come
// in any order, begin and end inside a page, and reach past end of file.
//
// Clients compute where segments begin by the same rule, which docs/dev/protocol.md has.
//
// # Indexes
//
// Two questions are asked of a Layout. Which bytes of the view does a range of a file's pages go to (File.Runs)? And
// which pages of the files do bytes of the view come from (Layout.Sources)? Both take time in proportion to the
// logarithm of the number of segments and to the length of the answer.
//
// # State
//
// State says which pages of a file changed since they were copied, and which are being copied. It may take more pages
// for changed than there are, never fewer.
package view
