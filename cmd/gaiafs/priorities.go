package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/gaiafs/gaiafs/pagecache"
)

// priorityFile is the value of --priorities: the file, and what it says. docs/eviction.md describes the file, and
// `gaiafs tune` writes one.
type priorityFile struct {
	path string
	list []pagecache.Preference
}

// priorityTable is an entry of the file.
type priorityTable struct {
	Path     string `toml:"path"` // below the mountpoint
	Priority int    `toml:"priority"`
	Place    string `toml:"place"` // "" or "host"
}

// Set reads the file; "none" stands for no file.
func (f *priorityFile) Set(text string) error {
	if text == "" || text == "none" {
		*f = priorityFile{}
		return nil
	}
	at, err := filepath.Abs(text)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(at)
	if err != nil {
		return fmt.Errorf("the file of priorities cannot be read: %w", err)
	}
	list, err := parsePriorities(string(content))
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	*f = priorityFile{at, list}
	return nil
}

func (f *priorityFile) String() string { return cmp.Or(f.path, "none") }
func (f *priorityFile) Type() string   { return "FILE" }

// parsePriorities reads the file's text.
func parsePriorities(text string) (list []pagecache.Preference, err error) {
	var file struct {
		File []priorityTable `toml:"file"`
	}
	known, err := toml.Decode(text, &file)
	if err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return nil, fmt.Errorf("line %d: %s", parse.Position.Line, parse.Message)
		}
		return nil, err
	}
	if unknown := known.Undecoded(); len(unknown) > 0 {
		return nil, fmt.Errorf("there is no %q; a [[file]] has path, priority and place", unknown[0].String())
	}
	seen := make(map[string]bool)
	for i, t := range file.File {
		path := strings.Trim(t.Path, "/")
		switch {
		case path == "":
			return nil, fmt.Errorf("file %d: path names a file or directory below the mountpoint", i+1)
		case seen[path]:
			return nil, fmt.Errorf("file %d: there are two entries for %q", i+1, path)
		case t.Place != "" && t.Place != "host":
			return nil, fmt.Errorf("file %d: place is \"host\", or left out: not %q", i+1, t.Place)
		}
		seen[path] = true
		p := pagecache.Preference{Path: path}
		p.Priority, p.OnHost = t.Priority, t.Place == "host"
		list = append(list, p)
	}
	return list, nil
}
