package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// otherVariables are environment variables that begin like settings but are not: the client libraries, the guard of a
// mount, and the tests read them.
var otherVariables = []string{"GAIAFS_CONFIG", "GAIAFS_EMULATED", takenVariable, "GAIAFS_LIBRARY", "GAIAFS_GUARD",
	"GAIAFS_TENANT", "GAIAFS_BINARY", "GAIAFS_BUILD",
	"GAIAFS_VERSION", "GAIAFS_REQUIRE_GPU", "GAIAFS_REQUIRE_TOOLS"}

// unknownVariables reports variables that look like settings of a mount but are not. Usually they are misspelt.
func unknownVariables(environment []string, tell func(text string)) {
	known := slices.Clone(otherVariables)
	for _, name := range settingNames() {
		known = append(known, variable(name))
	}
	for _, e := range environment {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, "GAIAFS_") || strings.HasPrefix(name, "GAIAFS_TEST_") ||
			slices.Contains(known, name) {
			continue
		}
		text := name + " is ignored: there is no such setting"
		if near := nearest(name, known); near != "" {
			text += fmt.Sprintf("; did you mean %s?", near)
		}
		tell(text)
	}
}

// nearest returns the word that is spelt most like name, or "" if none is similar.
func nearest(name string, among []string) string {
	// cobra measures the distance between words, for the names of commands.
	for distance := 1; distance <= 3; distance++ {
		c := &cobra.Command{SuggestionsMinimumDistance: distance}
		for _, word := range among {
			c.AddCommand(&cobra.Command{Use: word, Run: func(*cobra.Command, []string) {}})
		}
		if near := c.SuggestionsFor(name); len(near) > 0 {
			return near[0]
		}
	}
	return ""
}
