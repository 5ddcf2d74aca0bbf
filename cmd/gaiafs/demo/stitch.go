package demo

// reach is how many pixels on each side of a pixel the sharpening uses.
const reach = 2

// binomial is the blur that sharpening subtracts, horizontally and vertically; the weights add up to 16.
var binomial = [2*reach + 1]int32{1, 4, 6, 4, 1}

// amount is how much of the difference from the blur is added, in 256ths.
const amount = 192

// opener returns the content of a tile's file, and a function that gives it back.
type opener func(t tile) (file []byte, done func() error, err error)

// stitcher makes rows of the sharpened picture for the columns [x0, x1). Within a band, rows must be requested in
// ascending order. It is for one goroutine.
type stitcher struct {
	grid   grid
	open   opener
	x0, x1 int // columns of the result
	b0, b1 int // columns that are blended: [x0, x1), extended by reach on either side within the slide

	tiles []tile              // the tiles that are needed, row by row
	held  map[tile]heldPixels // open tiles

	rows  [2*reach + 1][]byte // blended rows, row y in rows[y % len(rows)]
	ready int                 // the next row to blend

	sum    []uint32 // for one row being blended: weighted colours, and weights
	weight []uint32
	column []int32 // for one row being sharpened: the vertical blur
}

type heldPixels struct {
	pixels []byte
	done   func() error
}

func newStitcher(g grid, open opener, x0, x1 int) *stitcher {
	s := &stitcher{grid: g, open: open, x0: x0, x1: x1, b0: max(x0-reach, 0), b1: min(x1+reach, g.W),
		held: make(map[tile]heldPixels)}
	for _, t := range g.tiles() {
		if t.x < s.b1 && s.b0 < t.x+t.w {
			s.tiles = append(s.tiles, t)
		}
	}
	n := s.b1 - s.b0
	for i := range s.rows {
		s.rows[i] = make([]byte, 3*n)
	}
	s.sum, s.weight, s.column = make([]uint32, 3*n), make([]uint32, n), make([]int32, 3*n)
	return s
}

// seek begins a band: the rows [y0, y1) are requested next. It gives back tiles that the band does not need.
func (s *stitcher) seek(y0, y1 int) error {
	s.ready = max(y0-reach, 0)
	for t := range s.held {
		if t.y+t.h <= y0-reach || t.y >= y1+reach {
			if err := s.drop(t); err != nil {
				return err
			}
		}
	}
	return nil
}

// row stores the 3·(x1-x0) bytes of row y into out.
func (s *stitcher) row(y int, out []byte) error {
	for ; s.ready < s.grid.H && s.ready <= y+reach; s.ready++ {
		if err := s.blend(s.ready, s.rows[s.ready%len(s.rows)]); err != nil {
			return err
		}
	}
	s.sharpen(y, out)
	return nil
}

// close gives all tiles back.
func (s *stitcher) close() error {
	var first error
	for t := range s.held {
		if err := s.drop(t); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (s *stitcher) drop(t tile) error {
	h := s.held[t]
	delete(s.held, t)
	return h.done()
}

// pixels returns a tile's pixels. It opens the file on first use.
func (s *stitcher) pixels(t tile) ([]byte, error) {
	if h, ok := s.held[t]; ok {
		return h.pixels, nil
	}
	file, done, err := s.open(t)
	if err != nil {
		return nil, err
	}
	pixels, err := t.pixels(file)
	if err != nil {
		_ = done() // report the damaged tile instead
		return nil, err
	}
	s.held[t] = heldPixels{pixels, done}
	return pixels, nil
}

// blend makes row y from the tiles that show it. If there are several, each has a weight that grows linearly with the
// pixel's distance from the tile's edge.
func (s *stitcher) blend(y int, out []byte) error {
	clear(s.sum)
	clear(s.weight)
	for _, t := range s.tiles {
		if y >= t.y+t.h {
			continue
		}
		if y < t.y {
			break // tiles are sorted by row
		}
		pixels, err := s.pixels(t)
		if err != nil {
			return err
		}
		down := s.feather(y-t.y, t.h)
		from, to := max(t.x, s.b0), min(t.x+t.w, s.b1)
		in := pixels[3*((y-t.y)*t.w+from-t.x):]
		for x := from; x < to; x++ {
			w := down * s.feather(x-t.x, t.w)
			i, j := 3*(x-s.b0), 3*(x-from)
			s.sum[i] += w * uint32(in[j])
			s.sum[i+1] += w * uint32(in[j+1])
			s.sum[i+2] += w * uint32(in[j+2])
			s.weight[x-s.b0] += w
		}
	}
	for i, w := range s.weight {
		for c := 3 * i; c < 3*i+3; c++ {
			out[c] = byte((s.sum[c] + w/2) / w)
		}
	}
	return nil
}

// feather returns the weight of pixel i of n. It falls off towards the edges, over the overlap.
func (s *stitcher) feather(i, n int) uint32 {
	return uint32(min(i+1, n-i, max(s.grid.Overlap, 1)))
}

// sharpen stores row y of the result: the blended row plus a part of its difference from a blur. At the edges of the
// slide, the outermost pixels are repeated.
func (s *stitcher) sharpen(y int, out []byte) {
	clear(s.column)
	for k, w := range binomial {
		in := s.rows[min(max(y+k-reach, 0), s.grid.H-1)%len(s.rows)]
		for i, v := range in {
			s.column[i] += w * int32(v)
		}
	}
	here := s.rows[y%len(s.rows)]
	last := s.grid.W - 1
	for x := s.x0; x < s.x1; x++ {
		for c := range 3 {
			var blur int32
			for k, w := range binomial {
				at := min(max(x+k-reach, 0), last)
				blur += w * s.column[3*(at-s.b0)+c]
			}
			v := int32(here[3*(x-s.b0)+c])
			v += (v*256 - blur) * amount >> 16
			out[3*(x-s.x0)+c] = byte(min(max(v, 0), 255))
		}
	}
}
