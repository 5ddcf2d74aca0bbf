package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/gaiafs/gaiafs/pagecache"
)

// mostText is the largest size of a file of settings, tenants or priorities.
const mostText = 1 << 20

// readText returns the text of a file, which has at most mostText bytes.
func readText(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostText+1))
	switch {
	case err != nil:
		return "", err
	case len(text) > mostText:
		return "", fmt.Errorf("%s is longer than %d bytes", path, mostText)
	case strings.Contains(string(text), "\x00"):
		return "", fmt.Errorf("%s is not text: it has zero bytes", path)
	}
	return string(text), nil
}

// noList is the value of a setting of type listFile that names no file.
const noList = "none"

// listFile is the value of a setting that names a TOML file: the path and the list in the file.
type listFile[T any] struct {
	path, text string // noList or "" as path: no file
	list       []T
	what       string // the contents, for errors
	parse      func(text string) ([]T, error)
}

// fileSetting is a listFile of any type.
type fileSetting interface {
	// Set reads the file at the path.
	Set(path string) error
	// take is Set with the result of content. It opens no file.
	take(content string) error
	// content returns the path, a newline and the text of the file, or noList.
	content() string
}

var _ = []fileSetting{&listFile[pagecache.Tenant]{}, &listFile[pagecache.Preference]{}}

func (f *listFile[T]) Set(path string) error {
	if path == "" || path == noList {
		return f.take(noList)
	}
	at, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	text, err := readText(at)
	if err != nil {
		return fmt.Errorf("the %s file cannot be read: %w", f.what, err)
	}
	return f.take(at + "\n" + text)
}

func (f *listFile[T]) take(content string) error {
	path, text, ok := strings.Cut(content, "\n")
	switch {
	case content == noList:
		f.path, f.text, f.list = "", "", nil
		return nil
	case !ok:
		return errors.New("the daemon opens no file for a client: the text of the file follows its path and a newline")
	}
	list, err := f.parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f.path, f.text, f.list = path, text, list
	return nil
}

func (f *listFile[T]) content() string {
	if f.path == "" {
		return noList
	}
	return f.path + "\n" + f.text
}

func (f *listFile[T]) String() string { return cmp.Or(f.path, noList) }
func (f *listFile[T]) Type() string   { return "FILE" }

// readAgain returns an error if the file at a path can be read only once, or only by this process.
func readAgain(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	shared := st.Mode().IsRegular() || path == os.DevNull
	for _, own := range []string{"/dev/stdin", "/dev/fd/", "/proc/self/"} {
		shared = shared && !strings.HasPrefix(path, own)
	}
	if !shared {
		return fmt.Errorf("%s is no file that another process can read; name a regular file", path)
	}
	return nil
}

// decodeTOML decodes the text of a file. Its error names the line or the unknown key. known lists the known keys.
func decodeTOML(text string, into any, known string) error {
	file, err := toml.Decode(text, into)
	if err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return fmt.Errorf("line %d: %s", parse.Position.Line, parse.Message)
		}
		return err
	}
	if unknown := file.Undecoded(); len(unknown) > 0 {
		return fmt.Errorf("there is no %q; %s", unknown[0].String(), known)
	}
	return nil
}
