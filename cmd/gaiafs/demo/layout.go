package demo

import (
	"fmt"
	"image/png"
	"io"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// layout is the layout of the output file: a page with the header, then the rows. Each row begins on a page boundary
// and has three bytes per pixel. The bytes after the end of a row are never written.
type layout struct {
	w, h int // pixels
}

// program is one of the two programs that write the picture.
type program int

const (
	leftProgram  program = iota // a CPU program, or a device program if there are two devices
	rightProgram                // a device program
)

func (p program) String() string { return [...]string{"left", "right"}[p] }

// header returns the beginning of the file: a text that describes the layout.
func (l layout) header() []byte {
	return fmt.Appendf(nil, "gaiafs demo picture: %d × %d pixels of 3 bytes (red, green, blue); row y begins at byte %d + y × %d\n",
		l.w, l.h, page.Size, l.stride())
}

func (l layout) stride() int64 { return page.Count(int64(3 * l.w)).Offset() }

func (l layout) size() int64 { return page.Size + int64(l.h)*l.stride() }

// columns returns the columns [x0, x1) that p writes: its half of every row.
func (l layout) columns(p program) (x0, x1 int) {
	if p == leftProgram {
		return 0, l.w / 2
	}
	return l.w / 2, l.w
}

// span returns the n bytes at off of the file that p writes in row y.
func (l layout) span(p program, y int) (off, n int64) {
	x0, x1 := l.columns(p)
	return page.Size + int64(y)*l.stride() + int64(3*x0), int64(3 * (x1 - x0))
}

// pages returns how many pages p writes in row y, and how many of them the other program writes too.
func (l layout) pages(p program, y int) (written, shared int64) {
	mine := page.Covering(l.span(p, y))
	others := page.Covering(l.span(1-p, y))
	return mine.Len(), mine.Intersect(others).Len()
}

// raster decodes the picture in an output file.
func (l layout) raster(file []byte) *raster {
	r := newRaster(l.w, l.h)
	for y := range l.h {
		off, _ := l.span(leftProgram, y)
		copy(r.row(y), file[off:])
	}
	return r
}

// encode writes the picture in an output file as a PNG.
func (l layout) encode(w io.Writer, file []byte) error {
	e := png.Encoder{CompressionLevel: png.BestSpeed}
	return e.Encode(w, l.raster(file))
}

// bands returns the rows in the order in which p makes them, as ranges of at most n rows. The left program begins at
// the top and the right one at the bottom. So some common pages get the left program's bytes first and some the right
// one's, and where the two meet they are written at once.
func (l layout) bands(p program, n int) [][2]int {
	var all [][2]int
	for y := 0; y < l.h; y += n {
		all = append(all, [2]int{y, min(y+n, l.h)})
	}
	if p == rightProgram {
		slices.Reverse(all)
	}
	return all
}

// paint makes p's half of the picture in an output file, row by row. It calls done after every band of rows.
func (l layout) paint(p program, g grid, open opener, file io.WriterAt, band int,
	done func(y0, y1 int) error) (err error) {
	x0, x1 := l.columns(p)
	s := newStitcher(g, open, x0, x1)
	row := make([]byte, 3*(x1-x0))
	defer func() {
		if cerr := s.close(); err == nil {
			err = cerr
		}
	}()
	for _, b := range l.bands(p, band) {
		if err := s.seek(b[0], b[1]); err != nil {
			return err
		}
		for y := b[0]; y < b[1]; y++ {
			off, _ := l.span(p, y)
			if err := s.row(y, row); err != nil {
				return err
			}
			if _, err := file.WriteAt(row, off); err != nil {
				return err
			}
		}
		if err := done(b[0], b[1]); err != nil {
			return err
		}
	}
	return nil
}

// reference makes the whole output file in this process, in plain memory. files has the contents of the tiles by name.
func (l layout) reference(g grid, files map[string][]byte) ([]byte, error) {
	file := make([]byte, l.size())
	copy(file, l.header())
	open := func(t tile) ([]byte, func() error, error) {
		return files[t.name()], func() error { return nil }, nil
	}
	s := newStitcher(g, open, 0, l.w)
	for y := range l.h {
		off, _ := l.span(leftProgram, y)
		if err := s.row(y, file[off:off+int64(3*l.w)]); err != nil {
			return nil, err
		}
	}
	return file, s.close()
}
