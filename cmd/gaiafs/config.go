package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/spf13/pflag"
)

// systemConfig is read by every mount that is given no configuration file.
const systemConfig = "/etc/gaiafs.toml"

// configFile is a file of settings in TOML, whose keys are the names of flags.
type configFile struct {
	path    string
	content string
}

// configFiles reads the file asked for, which must exist. If none is asked for, it reads the user's and the system's
// file, if they exist. Earlier files take precedence.
func configFiles(asked string, environment func(string) (string, bool)) ([]*configFile, error) {
	if asked == "" {
		asked, _ = environment(variable("config"))
	}
	if asked != "" {
		c, err := readConfig(asked)
		if err != nil {
			return nil, usagef("the configuration file cannot be read: %w", err)
		}
		return []*configFile{c}, nil
	}
	paths := []string{systemConfig}
	if dir := userConfig(environment); dir != "" {
		paths = slices.Insert(paths, 0, filepath.Join(dir, "gaiafs", "config.toml"))
	}
	var files []*configFile
	for _, path := range paths {
		c, err := readConfig(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return nil, usagef("the configuration file cannot be read: %w", err)
		}
		files = append(files, c)
	}
	return files, nil
}

// userConfig returns the directory of the user's configuration (XDG base directory specification), or "".
func userConfig(environment func(string) (string, bool)) string {
	if dir, ok := environment("XDG_CONFIG_HOME"); ok && filepath.IsAbs(dir) {
		return dir
	}
	if home, ok := environment("HOME"); ok && filepath.IsAbs(home) {
		return filepath.Join(home, ".config")
	}
	return ""
}

func readConfig(path string) (*configFile, error) {
	text, err := readText(path)
	if err != nil {
		return nil, err
	}
	return &configFile{path: path, content: text}, nil
}

// read returns the settings of the file as text, for the flags in known.
func (c *configFile) read(known *pflag.FlagSet) (map[string]string, error) {
	raw := make(map[string]any)
	if _, err := toml.Decode(c.content, &raw); err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return nil, usagef("%s:%d: %s", c.path, parse.Position.Line, parse.Message)
		}
		return nil, usagef("%s: %w", c.path, err)
	}
	values := make(map[string]string, len(raw))
	for name, v := range raw {
		if known.Lookup(name) == nil {
			return nil, c.fault(name, fmt.Errorf("there is no such setting; 'gaiafs mount --help' "+
				"lists them"))
		}
		switch v := v.(type) {
		case string:
			values[name] = v
		case bool:
			values[name] = strconv.FormatBool(v)
		case int64:
			values[name] = strconv.FormatInt(v, 10)
		default:
			return nil, c.fault(name, fmt.Errorf("the value must be a text, a whole number, true or false"))
		}
	}
	return values, nil
}

// fault returns an error about one key, with its line number.
func (c *configFile) fault(name string, err error) error {
	return usagef("%s:%d: %s: %w", c.path, c.line(name), name, err)
}

// reject refuses to be decoded. The decoder's error then says where the value is.
type reject struct{}

// UnmarshalTOML implements toml.Unmarshaler.
func (reject) UnmarshalTOML(any) error { return errors.New("rejected") }

// line returns the line of a top-level key. The decoder reports positions only in errors. So the file is decoded once
// more, into a struct whose only field has this key and refuses its value.
func (c *configFile) line(name string) int {
	target := reflect.New(reflect.StructOf([]reflect.StructField{{
		Name: "Key",
		Type: reflect.TypeFor[*reject](),
		Tag:  reflect.StructTag("toml:" + strconv.Quote(name)),
	}}))
	_, err := toml.Decode(c.content, target.Interface())
	var parse toml.ParseError
	if errors.As(err, &parse) && parse.Position.Line > 0 {
		return parse.Position.Line
	}
	// The name cannot be in a struct tag, for instance because it has a comma: search for it.
	for i, line := range strings.Split(c.content, "\n") {
		if strings.Contains(line, name) {
			return i + 1
		}
	}
	return 1
}
