package gpubackend

import (
	"fmt"
	"iter"
)

// Copy moves bytes between Host and Mem. In Mem they are adjacent, from byte offset Off on.
//
// If Row is 0, they are all bytes of Host. Otherwise Host has rows of Row bytes, and each begins Stride bytes after the
// start of the one before. Host ends with the last row, which may be shorter. The bytes between rows are not touched,
// and may change meanwhile. CopyIn and CopyOut both take rows; Stride must be at least Row.
type Copy struct {
	Mem         Memory
	Off         int64
	Host        []byte
	Row, Stride int64
}

// Check returns ErrRange unless Host, Row and Stride fit together. The other methods need that.
func (c *Copy) Check() error {
	n := int64(len(c.Host))
	if c.Row == 0 && c.Stride == 0 || c.Row > 0 && c.Stride >= c.Row && (n == 0 || (n-1)%c.Stride < c.Row) {
		return nil
	}
	return fmt.Errorf("%w: %d bytes in rows of %d, %d apart", ErrRange, n, c.Row, c.Stride)
}

// Bytes returns how many bytes are moved.
func (c *Copy) Bytes() int64 {
	n := int64(len(c.Host))
	if c.Row == 0 || n == 0 {
		return n
	}
	return (n-1)/c.Stride*c.Row + (n-1)%c.Stride + 1
}

// Rows yields the rows of Host, each with its offset in Mem. Without rows, it yields all of Host.
func (c *Copy) Rows() iter.Seq2[int64, []byte] {
	return func(yield func(int64, []byte) bool) {
		n := int64(len(c.Host))
		if c.Row == 0 {
			yield(c.Off, c.Host)
			return
		}
		for at, off := int64(0), c.Off; at < n; at, off = at+c.Stride, off+c.Row {
			if !yield(off, c.Host[at:min(at+c.Row, n)]) || c.Stride >= n-at { // at must not overflow
				return
			}
		}
	}
}

// AppendPart appends the copies that move n bytes, from byte `from` of those that c moves on. There are at most two:
// the rest of a row, and the rows after it.
func (c Copy) AppendPart(list []Copy, from, n int64) []Copy {
	c.Off += from
	if c.Row == 0 {
		c.Host = c.Host[from : from+n]
		return append(list, c)
	}
	at := from / c.Row * c.Stride
	if in := from % c.Row; in > 0 && n > 0 {
		first := min(c.Row-in, n)
		list = append(list, Copy{Mem: c.Mem, Off: c.Off, Host: c.Host[at+in:][:first]})
		c.Off, n, at = c.Off+first, n-first, at+c.Stride
	}
	if n <= 0 {
		return list
	}
	end := at + (n-1)/c.Row*c.Stride + (n-1)%c.Row + 1
	if c.Host = c.Host[at:end]; n <= c.Row {
		c.Row, c.Stride = 0, 0
	}
	return append(list, c)
}
