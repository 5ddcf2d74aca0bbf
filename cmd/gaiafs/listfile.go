package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/BurntSushi/toml"
)

// listFile is the value of a setting that names a TOML file: the path and the list in the file.
type listFile[T any] struct {
	path string
	list []T
}

// read reads the file. what names its contents in errors. "none" stands for no file.
func (f *listFile[T]) read(path, what string, parse func(text string) ([]T, error)) error {
	if path == "" || path == "none" {
		*f = listFile[T]{}
		return nil
	}
	at, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(at)
	if err != nil {
		return fmt.Errorf("the %s file cannot be read: %w", what, err)
	}
	list, err := parse(string(content))
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	*f = listFile[T]{at, list}
	return nil
}

func (f *listFile[T]) String() string { return cmp.Or(f.path, "none") }
func (f *listFile[T]) Type() string   { return "FILE" }

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
