package arrows

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// widest is the maximum number of columns of a line, with tabs of four.
const widest = 120

// literals match strings and addresses. They are not broken, so that they can be searched for, and may extend further.
var literals = regexp.MustCompile("\"(?:[^\"\\\\]|\\\\.)*\"|'(?:[^'\\\\]|\\\\.)'|`[^`]*`|https?://\\S+")

// wide are the name endings of files whose lines end at widest.
var wide = map[string]bool{
	".go": true, ".c": true, ".h": true, ".hpp": true, ".cu": true, ".cuh": true, ".py": true, ".tla": true, ".cfg": true,
}

// TestLinesEnd fails if a line is too wide to stand side by side with another file.
func TestLinesEnd(t *testing.T) {
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "build" || name == "shared") {
			return filepath.SkipDir
		}
		if d.IsDir() || !wide[filepath.Ext(name)] {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for i, line := range tooWide(string(text), filepath.Ext(name) == ".go") {
			if line != "" {
				t.Errorf("%s:%d: the line has more than %d columns", path, i+1, widest)
			}
		}
		return nil
	}))
}

// tooWide returns the lines of a text, with "" for each line that is not too wide. With raw, text between backquotes
// over several lines is a literal.
func tooWide(text string, raw bool) []string {
	lines := strings.Split(text, "\n")
	inside := false
	for i, line := range lines {
		was := inside
		if raw && strings.Count(line, "`")%2 == 1 && !strings.Contains(line, "\"`") && !strings.Contains(line, "'`'") {
			inside = !inside
		}
		if was || inside || columns(literals.ReplaceAllString(line, `""`)) <= widest {
			lines[i] = ""
		}
	}
	return lines
}

func columns(line string) int {
	return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t")
}

// A test of the test.
func TestTooWide(t *testing.T) {
	long := strings.Repeat("x", widest)
	require.Equal(t, []string{"", "\t" + long, "", ""}, tooWide(long+"\n\t"+long+"\nf(\""+long+"\")\nhttps://"+long, true))
	require.Equal(t, []string{"", "", "", long + "y"}, tooWide("a := `\n"+long+"y\n`\n"+long+"y", true))
	require.Equal(t, []string{"", long + "y", ""}, tooWide("`\n"+long+"y\n`", false))
}
