package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Shells complete flags that take one of several words.
func TestChoicesAreCompleted(t *testing.T) {
	for args, words := range map[string]string{"warm --device": "0 all host", "pin --device": "0 all host",
		"profile m --kind": "cpu heap goroutines stacks", "mount --device-reads": "auto always off"} {
		r := gaiafsCommand(t, append(append([]string{"__complete"}, strings.Fields(args)...), "")...)
		require.Equal(t, strings.Fields(words), strings.Fields(strings.Split(r.out, ":")[0]), args)
	}
}
