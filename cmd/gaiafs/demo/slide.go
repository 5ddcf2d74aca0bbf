package demo

// DefaultWidth is the width of the slide in pixels. A row of the output file is then 9,600 bytes long, two pages and a
// third, and its middle lies inside the second page.
const DefaultWidth = 3200

// place is the place of a picture on the slide, and the part of the picture that is shown.
type place struct {
	picture    *Picture
	x, y, w, h int // on the slide
	cropX      int // the part of the picture: cropW × cropH pixels at (cropX, cropY)
	cropY      int
	cropW      int
	cropH      int
}

// arrange lays the pictures out in rows as wide as the slide, and returns the slide's height. It crops the ends of
// pictures more than four times as wide as high, or more than twice as high as wide.
func arrange(pictures []Picture, width int) (places []place, height int) {
	columns := 1
	for columns*columns < len(pictures) {
		columns++
	}
	rows := (len(pictures) + columns - 1) / columns
	for r := range rows {
		// Spread evenly: rows differ by at most one picture.
		first, end := r*len(pictures)/rows, (r+1)*len(pictures)/rows
		line := make([]place, 0, end-first)
		aspects := 0.0
		for i := first; i < end; i++ {
			p := crop(&pictures[i])
			aspects += float64(p.cropW) / float64(p.cropH)
			line = append(line, p)
		}
		h := max(int(float64(width)/aspects), 1)
		x := 0
		for i := range line {
			p := &line[i]
			p.x, p.y, p.h = x, height, h
			p.w = max(p.cropW*h/p.cropH, 1)
			if i == len(line)-1 {
				p.w = width - x
			}
			x += p.w
		}
		places = append(places, line...)
		height += h
	}
	return places, height
}

// crop cuts off the ends of a picture that is too long.
func crop(p *Picture) place {
	w, h := p.W, p.H
	if w > 4*h {
		w = 4 * h
	}
	if h > 2*w {
		h = 2 * w
	}
	return place{picture: p, cropX: (p.W - w) / 2, cropY: (p.H - h) / 2, cropW: w, cropH: h}
}

// drawSlide decodes the pictures one at a time and draws them on a slide of that width. It calls step after each.
func drawSlide(pictures []Picture, width int, step func(p *Picture)) (*raster, error) {
	places, height := arrange(pictures, width)
	slide := newRaster(width, height)
	for _, p := range places {
		src, err := p.picture.decode()
		if err != nil {
			return nil, err
		}
		resample(slide, p.x, p.y, p.w, p.h, src, p.cropX, p.cropY, p.cropW, p.cropH)
		step(p.picture)
	}
	return slide, nil
}
