package demo

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
)

// Side and overlap of a tile in pixels.
const (
	tileSide    = 512
	tileOverlap = 64
)

// grid describes how a slide is cut into tiles.
type grid struct {
	W int `json:"width"`
	H int `json:"height"`
	// Side is the width and height of a tile, or less if the slide is smaller. Neighbouring tiles share at least
	// Overlap.
	Side    int `json:"side"`
	Overlap int `json:"overlap"`
}

// tile is a rectangle of the slide.
type tile struct {
	column, row int
	x, y, w, h  int
}

func (t tile) name() string { return fmt.Sprintf("tile-%02d-%02d.ppm", t.row, t.column) }

// starts returns where the tiles begin along an edge of n pixels. The last one ends where the slide ends.
func (g grid) starts(n int) []int {
	if n <= g.Side {
		return []int{0}
	}
	var s []int
	for at := 0; at < n-g.Side; at += g.Side - g.Overlap {
		s = append(s, at)
	}
	return append(s, n-g.Side)
}

// tiles returns all tiles, row by row.
func (g grid) tiles() []tile {
	var all []tile
	for r, y := range g.starts(g.H) {
		for c, x := range g.starts(g.W) {
			all = append(all, tile{column: c, row: r, x: x, y: y, w: min(g.Side, g.W), h: min(g.Side, g.H)})
		}
	}
	return all
}

// header returns the beginning of the tile's file: a portable pixmap, which any picture viewer shows.
func (t tile) header() []byte { return fmt.Appendf(nil, "P6\n%d %d\n255\n", t.w, t.h) }

// fileSize returns the size in bytes.
func (t tile) fileSize() int64 { return int64(len(t.header()) + 3*t.w*t.h) }

// pixels returns the pixels of a tile's file, without copying.
func (t tile) pixels(file []byte) ([]byte, error) {
	header := t.header()
	if int64(len(file)) < t.fileSize() || !bytes.Equal(file[:len(header)], header) {
		return nil, fmt.Errorf("%s is damaged: it is not the tile that was cut", t.name())
	}
	return file[len(header):t.fileSize()], nil
}

// cut writes the tiles of a slide as files into a directory.
func cut(slide *raster, g grid, dir string) error {
	for _, t := range g.tiles() {
		file := append(make([]byte, 0, t.fileSize()), t.header()...)
		for y := t.y; y < t.y+t.h; y++ {
			file = append(file, slide.row(y)[3*t.x:3*(t.x+t.w)]...)
		}
		if err := os.WriteFile(filepath.Join(dir, t.name()), file, 0o644); err != nil {
			return fmt.Errorf("a tile could not be written: %w", err)
		}
	}
	return nil
}
