package demo

import (
	"embed"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // decoder
	_ "image/png"  // decoder
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Limits for a folder of pictures.
const (
	maxPictures = 64
	// maxPixels bounds one decoded picture: 100 megapixels take 400 MB.
	maxPixels = 100 << 20
)

//go:embed photos/*.jpg photos/*.png
var photos embed.FS

// ErrPictures is wrapped by every error about pictures from the user.
var ErrPictures = errors.New("the pictures cannot be used")

// A Picture is a JPEG or PNG file of known size. Its pixels are decoded later.
type Picture struct {
	// Name is for messages.
	Name string
	// W and H are in pixels.
	W, H int
	open func() (io.ReadCloser, error)
}

// Photos returns the photographs that come with gaiafs; photos/README.md has their sources and licences.
func Photos() ([]Picture, error) {
	names, err := fs.Glob(photos, "photos/*.[jp][pn]g")
	if err != nil {
		return nil, err
	}
	return inspectAll(names, func(name string) (io.ReadCloser, error) { return photos.Open(name) }, path.Base)
}

// Folder returns the JPEG and PNG files of a directory, ordered by name. It fails with ErrPictures if there are none or
// too many, or if one cannot be read or is too large.
func Folder(dir string) ([]Picture, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPictures, err)
	}
	var names []string
	for _, e := range entries {
		switch strings.ToLower(filepath.Ext(e.Name())) {
		case ".jpg", ".jpeg", ".png":
			if !e.IsDir() {
				names = append(names, filepath.Join(dir, e.Name()))
			}
		}
	}
	switch {
	case len(names) == 0:
		return nil, fmt.Errorf("%w: %s has no file that ends with .jpg, .jpeg or .png", ErrPictures, dir)
	case len(names) > maxPictures:
		return nil, fmt.Errorf("%w: %s has %d of them; use a folder with at most %d", ErrPictures, dir, len(names),
			maxPictures)
	}
	return inspectAll(names, func(name string) (io.ReadCloser, error) { return os.Open(name) }, filepath.Base)
}

func inspectAll(names []string, open func(string) (io.ReadCloser, error),
	short func(string) string) ([]Picture, error) {
	slices.Sort(names)
	pictures := make([]Picture, 0, len(names))
	for _, name := range names {
		p := Picture{Name: short(name), open: func() (io.ReadCloser, error) { return open(name) }}
		if err := p.inspect(); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrPictures, name, err)
		}
		pictures = append(pictures, p)
	}
	return pictures, nil
}

// inspect reads the size of the picture.
func (p *Picture) inspect() error {
	f, err := p.open()
	if err != nil {
		return err
	}
	defer f.Close()
	c, _, err := image.DecodeConfig(f)
	if err != nil {
		return fmt.Errorf("it is not a JPEG or PNG that can be decoded (%w)", err)
	}
	if c.Width <= 0 || c.Height <= 0 {
		return fmt.Errorf("it has no pixels")
	}
	if c.Width > maxPixels/c.Height {
		return fmt.Errorf("%d × %d pixels are too many: scale it down to at most %d megapixels", c.Width, c.Height,
			maxPixels>>20)
	}
	p.W, p.H = c.Width, c.Height
	return nil
}

// decode decodes the pixels.
func (p *Picture) decode() (*raster, error) {
	f, err := p.open()
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrPictures, p.Name, err)
	}
	defer f.Close()
	img, _, err := image.Decode(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: it cannot be decoded (%w)", ErrPictures, p.Name, err)
	}
	return rasterOf(img), nil
}
