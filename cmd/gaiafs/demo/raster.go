package demo

import (
	"image"
	"image/color"
)

// raster is a picture with three bytes per pixel: red, green, blue.
type raster struct {
	w, h int
	pix  []byte // row by row, without padding
}

func newRaster(w, h int) *raster { return &raster{w: w, h: h, pix: make([]byte, 3*w*h)} }

// row returns the bytes of row y.
func (r *raster) row(y int) []byte { return r.pix[3*r.w*y : 3*r.w*(y+1)] }

// rasterOf converts a decoded picture. Transparent pixels become white.
func rasterOf(img image.Image) *raster {
	b := img.Bounds()
	r := newRaster(b.Dx(), b.Dy())
	i := 0
	for y := b.Min.Y; y < b.Max.Y; y++ {
		for x := b.Min.X; x < b.Max.X; x++ {
			red, green, blue, alpha := img.At(x, y).RGBA() // premultiplied, 16 bits
			white := 0xffff - alpha
			r.pix[i] = byte((red + white) >> 8)
			r.pix[i+1] = byte((green + white) >> 8)
			r.pix[i+2] = byte((blue + white) >> 8)
			i += 3
		}
	}
	return r
}

// The methods below make *raster an image.Image, for the PNG encoder.

// ColorModel implements image.Image.
func (r *raster) ColorModel() color.Model { return color.RGBAModel }

// Bounds implements image.Image.
func (r *raster) Bounds() image.Rectangle { return image.Rect(0, 0, r.w, r.h) }

// At implements image.Image.
func (r *raster) At(x, y int) color.Color {
	p := r.pix[3*(y*r.w+x):]
	return color.RGBA{p[0], p[1], p[2], 255}
}

// Opaque lets the PNG encoder leave out the alpha channel.
func (r *raster) Opaque() bool { return true }
