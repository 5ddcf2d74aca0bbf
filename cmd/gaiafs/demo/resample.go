package demo

// fraction is the number of fractional bits of a resampling weight.
const fraction = 14

// contribution lists the source samples that make one sample of the result, and their weights, which add up to
// 1<<fraction.
type contribution struct {
	first   int
	weights []int32
}

// contributions computes the contributions for scaling the n samples [from, from+n) to m samples. The filter is a
// triangle, as wide as a sample of the coarser grid.
func contributions(from, n, m int) []contribution {
	all := make([]contribution, m)
	wide := max(n, m) // support in units of 1/(2m) source samples below
	for i := range all {
		// The centre of sample i is at (2i+1)·n/(2m) source samples; positions are counted in 1/(2m).
		centre := (2*i + 1) * n
		first := max((centre-2*wide)/(2*m)-1, 0)
		last := min((centre+2*wide)/(2*m)+1, n-1)
		weights := make([]int64, 0, last-first+1)
		var sum int64
		for j := first; j <= last; j++ {
			distance := (2*j+1)*m - centre
			if distance < 0 {
				distance = -distance
			}
			w := int64(max(2*wide-distance, 0))
			weights = append(weights, w)
			sum += w
		}
		c := contribution{first: from + first, weights: make([]int32, len(weights))}
		rest, largest := int32(1<<fraction), 0
		for k, w := range weights {
			c.weights[k] = int32(w << fraction / sum)
			rest -= c.weights[k]
			if w > weights[largest] {
				largest = k
			}
		}
		c.weights[largest] += rest
		all[i] = c
	}
	return all
}

// resample scales the w×h pixels of src at (x, y) into the rectangle of dst at (dx, dy) of dw×dh pixels.
func resample(dst *raster, dx, dy, dw, dh int, src *raster, x, y, w, h int) {
	// First horizontally, for the source rows that are needed, then vertically.
	across := newRaster(dw, h)
	columns := contributions(x, w, dw)
	for r := range h {
		in, out := src.row(y+r), across.row(r)
		for i, c := range columns {
			var red, green, blue int32
			for k, weight := range c.weights {
				p := in[3*(c.first+k):]
				red += weight * int32(p[0])
				green += weight * int32(p[1])
				blue += weight * int32(p[2])
			}
			out[3*i], out[3*i+1], out[3*i+2] = settle(red), settle(green), settle(blue)
		}
	}
	for r, c := range contributions(0, h, dh) {
		out := dst.row(dy + r)[3*dx : 3*(dx+dw)]
		for i := range out {
			var sum int32
			for k, weight := range c.weights {
				sum += weight * int32(across.pix[3*dw*(c.first+k)+i])
			}
			out[i] = settle(sum)
		}
	}
}

// settle rounds a weighted sum to a byte.
func settle(sum int32) byte { return byte(min(max((sum+1<<(fraction-1))>>fraction, 0), 255)) }
