package main

import (
	"fmt"
	"strings"

	"github.com/gaiafs/gaiafs/pagecache"
)

// priorityTable is an entry of a file of priorities. docs/eviction.md describes the file, and `gaiafs tune` writes one.
type priorityTable struct {
	Path     string `toml:"path"` // below the mountpoint
	Priority int    `toml:"priority"`
	Place    string `toml:"place"` // "" or "host"
}

// parsePriorities reads the file's text.
func parsePriorities(text string) (list []pagecache.Preference, err error) {
	var file struct {
		File []priorityTable `toml:"file"`
	}
	if err := decodeTOML(text, &file, "a [[file]] has path, priority and place"); err != nil {
		return nil, err
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
			return nil, fmt.Errorf("file %d: place is \"host\" or left out, not %q", i+1, t.Place)
		}
		seen[path] = true
		p := pagecache.Preference{Path: path}
		p.Priority, p.OnHost = t.Priority, t.Place == "host"
		list = append(list, p)
	}
	return list, nil
}
