package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// sameWords are errors that programs in Go and in C get for the same faults. % stands for a value.
var sameWords = []string{
	"it is not on a gaiafs mount (the command gaiafs mount makes one)",
	"descriptor % is not of a regular file",
	"descriptor % was opened with O_PATH",
	"descriptor % is not open for reading",
	"descriptor % is not open for writing",
	"the mount has no devices of kind %, only GPUs",
	"the mount has no GPUs, only emulated devices: ask for one of these",
	"the mount's devices are GPUs, and % cannot be loaded here (%): install the NVIDIA driver's library in this " +
		"environment, or start the container with access to the GPUs",
	"this process has no descriptors left for the extents: see ulimit -n",
	"a bracket of % ranges; it has 1 to %",
	"there are % ranges, and a request has 1 to %",
	"there are % files, and a view has 1 to %",
	"there are no segments",
	"there are % segments, and a view has at most %",
	"segment % is of file %, and there are %",
	"the mappings are of several mounts",
}

var (
	joined = regexp.MustCompile(`"\s*\+?\s*"`)
	verbs  = regexp.MustCompile(`%[-#.0-9]*(?:ll|z|l)?[a-zA-Z]`)
)

// words returns the text of the sources that match a pattern, with joined literals, and % for each verb.
func words(t *testing.T, pattern string) string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	require.NoError(t, err)
	require.NotEmpty(t, names)
	var all strings.Builder
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		all.Write(b)
	}
	text := verbs.ReplaceAllString(joined.ReplaceAllString(all.String(), ""), "%")
	return strings.ReplaceAll(text, "libcuda.so.1 cannot be loaded", "% cannot be loaded")
}

// TestSameWords: the same error has the same words in Go and in C.
func TestSameWords(t *testing.T) {
	goes, c := words(t, "../go/*.go"), words(t, "../c/*.c")
	for _, text := range sameWords {
		require.Contains(t, goes, text, "client/go")
		require.Contains(t, c, text, "client/c")
	}
}
