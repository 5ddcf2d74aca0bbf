package pagecache

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPrintable(t *testing.T) {
	for name, want := range map[string]string{
		"a/b c'\"d": "a/b c'\"d", "größe-☃": "größe-☃", "": "",
		"a\nb": `"a\nb"`, "\x1b[2J": `"\x1b[2J"`, "\u009b2J": `"\u009b2J"`, "\xff": `"\xff"`, "a\u202eb": `"a\u202eb"`,
	} {
		require.Equal(t, want, Printable(name))
	}
	require.Equal(t, `7 bytes of "a\nb": full`, Waiting{File: "a\nb", Bytes: 7, Error: "full"}.String())
}
