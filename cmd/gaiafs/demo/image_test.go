package demo

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// pattern is a picture in which every pixel differs from its neighbours.
func pattern(w, h int) *raster {
	r := newRaster(w, h)
	for i := range r.pix {
		r.pix[i] = byte(i*i>>3 ^ i*7)
	}
	return r
}

func flat(w, h int, v byte) *raster {
	return &raster{w: w, h: h, pix: bytes.Repeat([]byte{v}, 3*w*h)}
}

// tilesOf returns the files that cut makes, by name.
func tilesOf(t *testing.T, slide *raster, g grid) map[string][]byte {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, cut(slide, g, dir))
	files := make(map[string][]byte)
	for _, tl := range g.tiles() {
		b, err := os.ReadFile(filepath.Join(dir, tl.name()))
		require.NoError(t, err)
		files[tl.name()] = b
	}
	return files
}

func TestPhotosAreThoseOfTheirReadme(t *testing.T) {
	pictures, err := Photos()
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(pictures), 4)
	readme, err := os.ReadFile("photos/README.md")
	require.NoError(t, err)
	for _, p := range pictures {
		require.Contains(t, string(readme), "`"+p.Name+"`", "source and licence are recorded")
	}
}

func TestTilesCoverTheSlideAndOverlap(t *testing.T) {
	for _, g := range []grid{{W: 3200, H: 2274, Side: 512, Overlap: 64}, {W: 512, H: 513, Side: 512, Overlap: 64},
		{W: 10, H: 20, Side: 512, Overlap: 64}, {W: 961, H: 960, Side: 512, Overlap: 64}} {
		for _, n := range []int{g.W, g.H} {
			starts := g.starts(n)
			side := min(g.Side, n)
			require.Equal(t, 0, starts[0])
			require.Equal(t, n, starts[len(starts)-1]+side)
			for i := 1; i < len(starts); i++ {
				require.Greater(t, starts[i], starts[i-1])
				require.GreaterOrEqual(t, starts[i-1]+side-starts[i], g.Overlap)
			}
		}
	}
}

func TestTilesAreOrdinaryPixmaps(t *testing.T) {
	g := grid{W: 7, H: 5, Side: 4, Overlap: 1}
	files := tilesOf(t, pattern(7, 5), g)
	first := g.tiles()[0]
	require.Equal(t, "P6\n4 4\n255\n", string(files[first.name()][:11]))
	_, err := first.pixels(files[first.name()][:20])
	require.ErrorContains(t, err, "damaged")
	_, err = first.pixels(make([]byte, 4096))
	require.ErrorContains(t, err, "damaged")
}

// If all tiles agree, blending gives back the slide: the weights cancel out.
func TestBlendGivesBackTheSlide(t *testing.T) {
	slide := pattern(150, 90)
	g := grid{W: 150, H: 90, Side: 40, Overlap: 7}
	files := tilesOf(t, slide, g)
	s := newStitcher(g, func(tl tile) ([]byte, func() error, error) {
		return files[tl.name()], func() error { return nil }, nil
	}, 0, g.W)
	out := make([]byte, 3*g.W)
	for y := range g.H {
		require.NoError(t, s.blend(y, out))
		require.Equal(t, slide.row(y), out, "row %d", y)
	}
}

// Across the overlap of tiles that differ, blending is linear.
func TestBlendIsALinearFeather(t *testing.T) {
	g := grid{W: 18, H: 4, Side: 10, Overlap: 2}
	files := tilesOf(t, flat(18, 4, 0), g)
	second := g.tiles()[1]
	file := files[second.name()]
	for i := len(second.header()); i < len(file); i++ {
		file[i] = 90
	}
	s := newStitcher(g, func(tl tile) ([]byte, func() error, error) {
		return files[tl.name()], func() error { return nil }, nil
	}, 0, g.W)
	out := make([]byte, 3*g.W)
	require.NoError(t, s.blend(1, out))
	require.Equal(t, byte(0), out[3*7])
	require.Equal(t, byte(30), out[3*8], "two parts of the first tile, one of the second")
	require.Equal(t, byte(60), out[3*9])
	require.Equal(t, byte(90), out[3*10])
}

func TestSharpenKeepsFlatAndLiftsEdges(t *testing.T) {
	stitch := func(slide *raster) []byte {
		g := grid{W: slide.w, H: slide.h, Side: 8, Overlap: 2}
		l := layout{w: slide.w, h: slide.h}
		file, err := l.reference(g, tilesOf(t, slide, g))
		require.NoError(t, err)
		return l.raster(file).pix
	}
	require.Equal(t, flat(20, 20, 77).pix, stitch(flat(20, 20, 77)))
	edge := flat(20, 20, 50)
	for y := range 20 {
		copy(edge.row(y)[30:], bytes.Repeat([]byte{150}, 30))
	}
	got := stitch(edge)
	row := got[10*60 : 11*60]
	require.Less(t, row[27], byte(50), "the dark side gets darker")
	require.Greater(t, row[30], byte(150), "the bright side gets brighter")
	require.Equal(t, byte(50), row[0], "far from the edge nothing changes")
}

// The two programs together make the same bytes as a single process. Neither stores into the other's half.
func TestHalvesMakeTheWhole(t *testing.T) {
	for _, size := range [][2]int{{3200, 30}, {700, 75}, {33, 40}, {2, 8}} {
		slide := pattern(size[0], size[1])
		g := grid{W: slide.w, H: slide.h, Side: 32, Overlap: 6}
		l := layout{w: slide.w, h: slide.h}
		files := tilesOf(t, slide, g)
		want, err := l.reference(g, files)
		require.NoError(t, err)

		open, closed := 0, 0
		opener := func(tl tile) ([]byte, func() error, error) {
			open++
			return files[tl.name()], func() error { closed++; return nil }, nil
		}
		var halves [2][]byte
		for _, p := range []program{leftProgram, rightProgram} {
			halves[p] = make([]byte, l.size())
			rows, last := 0, -1
			require.NoError(t, l.paint(p, g, opener, memory(halves[p]), 7, func(y0, y1 int) error {
				require.Less(t, y0, y1)
				rows, last = rows+y1-y0, y0
				return nil
			}))
			require.Equal(t, l.h, rows)
			require.Equal(t, p == rightProgram, last == 0 && l.h > 7, "one begins at the top, the other at the bottom")
		}
		require.Equal(t, open, closed, "every tile was given back")
		both := append([]byte{}, l.header()...)
		both = append(both, make([]byte, int(l.size())-len(both))...)
		for y := range l.h {
			for _, p := range []program{leftProgram, rightProgram} {
				off, n := l.span(p, y)
				copy(both[off:], halves[p][off:off+n])
				clear(halves[p][off : off+n])
			}
		}
		require.Zero(t, differences(both, want))
		require.Zero(t, differences(halves[leftProgram], make([]byte, l.size())))
		require.Zero(t, differences(halves[rightProgram], make([]byte, l.size())))
	}
}

func TestPaintPassesFailuresOn(t *testing.T) {
	g := grid{W: 40, H: 40, Side: 32, Overlap: 6}
	l := layout{w: 40, h: 40}
	missing := func(tile) ([]byte, func() error, error) { return nil, nil, io.ErrUnexpectedEOF }
	err := l.paint(leftProgram, g, missing, make(memory, l.size()), 8, func(int, int) error { return nil })
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	closed := 0
	damaged := func(tile) ([]byte, func() error, error) { return nil, func() error { closed++; return nil }, nil }
	err = l.paint(leftProgram, g, damaged, make(memory, l.size()), 8, func(int, int) error { return nil })
	require.ErrorContains(t, err, "damaged")
	require.Equal(t, 1, closed)
}

func TestEveryRowSharesAPage(t *testing.T) {
	l := layout{w: DefaultWidth, h: 100}
	require.Equal(t, int64(3*page.Size), l.stride())
	for y := range l.h {
		for _, p := range []program{leftProgram, rightProgram} {
			written, shared := l.pages(p, y)
			require.Equal(t, int64(2), written)
			require.Equal(t, int64(1), shared)
		}
		middle, _ := l.span(rightProgram, y)
		require.NotZero(t, middle%page.Size, "the middle is inside a page")
	}
	require.LessOrEqual(t, len(l.header()), page.Size)
}

func TestArrangeFillsTheSlide(t *testing.T) {
	for n := 1; n <= 7; n++ {
		pictures := make([]Picture, n)
		for i := range pictures {
			pictures[i] = Picture{W: 100 + 37*i, H: 150 - 11*i}
		}
		places, height := arrange(pictures, 640)
		require.Len(t, places, n)
		covered := 0
		for i, p := range places {
			require.Positive(t, p.w)
			require.LessOrEqual(t, p.y+p.h, height)
			covered += p.w * p.h
			for _, q := range places[:i] {
				require.True(t, image.Rect(p.x, p.y, p.x+p.w, p.y+p.h).Intersect(image.Rect(q.x, q.y, q.x+q.w,
					q.y+q.h)).Empty())
			}
		}
		require.Equal(t, 640*height, covered)
	}
	places, height := arrange([]Picture{{W: 10000, H: 10}}, 400)
	require.Equal(t, 100, height, "cropped to four times as wide as high")
	require.Equal(t, 40, places[0].cropW)
	_, height = arrange([]Picture{{W: 10, H: 10000}}, 400)
	require.Equal(t, 800, height)
}

func TestResample(t *testing.T) {
	src := flat(13, 9, 200)
	for _, size := range [][2]int{{13, 9}, {5, 4}, {31, 40}, {1, 1}} {
		dst := newRaster(size[0]+2, size[1]+2)
		resample(dst, 1, 1, size[0], size[1], src, 0, 0, 13, 9)
		require.Equal(t, flat(size[0], 1, 200).pix, dst.row(1)[3:3*(size[0]+1)], "%v: a flat picture stays flat", size)
		require.Zero(t, dst.pix[0], "nothing outside the rectangle")
		require.Zero(t, dst.row(1)[3*(size[0]+1)])
	}
	same := pattern(13, 9)
	dst := newRaster(13, 9)
	resample(dst, 0, 0, 13, 9, same, 0, 0, 13, 9)
	require.Equal(t, same.pix, dst.pix, "the same size copies")
}

func TestEncodeLeavesAPicture(t *testing.T) {
	slide := pattern(50, 20)
	l := layout{w: 50, h: 20}
	file := make([]byte, l.size())
	for y := range l.h {
		off, _ := l.span(leftProgram, y)
		copy(file[off:], slide.row(y))
	}
	var b bytes.Buffer
	require.NoError(t, l.encode(&b, file))
	img, err := png.Decode(&b)
	require.NoError(t, err)
	require.Equal(t, slide.pix, rasterOf(img).pix)
	require.Equal(t, color.RGBA{slide.pix[0], slide.pix[1], slide.pix[2], 255}, slide.At(0, 0))
}

func TestFolderOfTheUser(t *testing.T) {
	dir := t.TempDir()
	_, err := Folder(filepath.Join(dir, "missing"))
	require.ErrorIs(t, err, ErrPictures)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Folder(dir)
	require.ErrorContains(t, err, "has no file that ends with .jpg, .jpeg or .png")

	write := func(name string, img image.Image) {
		f, err := os.Create(filepath.Join(dir, name))
		require.NoError(t, err)
		require.NoError(t, png.Encode(f, img))
		require.NoError(t, f.Close())
	}
	write("b.PNG", pattern(20, 10))
	write("a.png", image.NewNRGBA(image.Rect(5, 5, 8, 9))) // transparent, and not at the origin
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("no picture"), 0o600))
	pictures, err := Folder(dir)
	require.NoError(t, err)
	require.Equal(t, []string{"a.png", "b.PNG"}, []string{pictures[0].Name, pictures[1].Name})
	r, err := pictures[0].decode()
	require.NoError(t, err)
	require.Equal(t, flat(3, 4, 255).pix, r.pix, "transparent is white")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "c.jpg"), []byte("no picture"), 0o600))
	_, err = Folder(dir)
	require.ErrorIs(t, err, ErrPictures)
	require.ErrorContains(t, err, "c.jpg: it is not a JPEG or PNG that can be decoded")
	require.NoError(t, os.Remove(filepath.Join(dir, "c.jpg")))

	// A header that claims 20,000 × 20,000 pixels. The test never allocates that much.
	var huge bytes.Buffer
	require.NoError(t, png.Encode(&huge, image.NewGray(image.Rect(0, 0, 1, 1))))
	b := huge.Bytes()
	copy(b[16:], []byte{0, 0, 0x4e, 0x20, 0, 0, 0x4e, 0x20})
	fixCRC(b)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "huge.png"), b, 0o600))
	_, err = Folder(dir)
	require.ErrorContains(t, err, "20000 × 20000 pixels are too many")
	require.NoError(t, os.Remove(filepath.Join(dir, "huge.png")))

	for i := range maxPictures {
		require.NoError(t, os.WriteFile(filepath.Join(dir, string(rune('a'+i%26))+string(rune('a'+i/26))+".png"), nil,
			0o600))
	}
	_, err = Folder(dir)
	require.ErrorContains(t, err, "at most 64")
}

func TestDrawSlideNamesWhatCannotBeDecoded(t *testing.T) {
	dir := t.TempDir()
	var b bytes.Buffer
	require.NoError(t, png.Encode(&b, pattern(30, 30)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "torn.png"), b.Bytes()[:b.Len()/2], 0o600))
	pictures, err := Folder(dir)
	require.NoError(t, err, "its header is intact")
	_, err = drawSlide(pictures, 100, func(*Picture) {})
	require.ErrorIs(t, err, ErrPictures)
	require.ErrorContains(t, err, "torn.png")
}

func TestDifferences(t *testing.T) {
	require.Zero(t, differences([]byte("abc"), []byte("abc")))
	require.Equal(t, int64(1), differences([]byte("abc"), []byte("abd")))
	require.Equal(t, int64(3), differences([]byte("ab"), []byte("xbcd")))
}
