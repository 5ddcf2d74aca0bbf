package rows

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// saying returns a function that writes a text.
func saying(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

func requireText(t *testing.T, path, want string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(text))
}

func TestLinksStayLinks(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "far/off"), 0o755))
	real, link, folder := filepath.Join(dir, "far/real"), filepath.Join(dir, "link"), filepath.Join(dir, "folder")
	require.NoError(t, os.Symlink("far/off", folder))
	require.NoError(t, os.Symlink("folder/../real", link)) // a path to far/real
	for _, text := range []string{"first", "second"} {     // first without an existing file, then with one
		require.NoError(t, CanBeWritten(link))
		require.NoError(t, WriteFile(link, saying(text)))
		st, err := os.Lstat(link)
		require.NoError(t, err)
		require.NotZero(t, st.Mode()&os.ModeSymlink)
		requireText(t, real, text)
	}
	require.NoError(t, os.Chmod(real, 0o640))
	require.NoError(t, WriteFile(link, saying("third")))
	st, err := os.Stat(real)
	require.NoError(t, err)
	require.EqualValues(t, 0o640, st.Mode())
	left, err := os.ReadDir(filepath.Dir(real))
	require.NoError(t, err)
	require.Len(t, left, 2)

	loop := filepath.Join(dir, "loop")
	require.NoError(t, os.Symlink("loop", loop))
	require.ErrorIs(t, WriteFile(loop, saying("")), unix.ELOOP)
	require.ErrorIs(t, CanBeWritten(folder), unix.EISDIR)
}

func TestPipesAreWrittenTo(t *testing.T) {
	dir := t.TempDir()
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	require.NoError(t, os.Symlink(pipe, link))
	require.NoError(t, CanBeWritten(link), "it does not wait for a reader")
	require.ErrorContains(t, WriteFile(link, saying("nothing")), "nobody reads it")
	require.False(t, IsReplaced(link))
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer reader.Close()
	require.NoError(t, CanBeWritten(link))
	require.NoError(t, WriteFile(link, saying("something")))
	text, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "something", string(text))
	for path, kind := range map[string]os.FileMode{pipe: os.ModeNamedPipe, link: os.ModeSymlink} {
		st, err := os.Lstat(path)
		require.NoError(t, err)
		require.NotZero(t, st.Mode()&kind, path)
	}
}

// As with --json /dev/stdout if that leads to an open file.
func TestOpenFilesWithoutAName(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Remove(f.Name()))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(filepath.Join("/proc/self/fd", fmt.Sprint(f.Fd())), link))
	require.NoError(t, CanBeWritten(link))
	require.NoError(t, WriteFile(link, saying("here")))
	text, err := io.ReadAll(f)
	require.NoError(t, err)
	require.Equal(t, "here", string(text))
	require.NoFileExists(t, f.Name())
}

func TestTheFolderIsTried(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "r")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	require.NoError(t, CanBeWritten(file))
	requireText(t, file, "old")
	require.NoError(t, os.WriteFile(file+part, []byte("left"), 0o600))
	require.NoError(t, CanBeWritten(file), "of a run that was killed")
	requireText(t, file+part, "left")
	require.NoError(t, os.Remove(file+part))
	require.NoError(t, os.Symlink("precious", file+part))
	require.ErrorContains(t, CanBeWritten(file), "in the way")
	require.ErrorIs(t, WriteFile(file, saying("new")), unix.ELOOP)
	require.NoFileExists(t, filepath.Join(dir, "precious"))
	require.NoError(t, os.Remove(file+part))
	require.Error(t, CanBeWritten(filepath.Join(dir, "none", "r")))

	require.ErrorIs(t, WriteFile(file, func(io.Writer) error { return unix.ENOSPC }), unix.ENOSPC)
	requireText(t, file, "old")
	require.NoFileExists(t, file+part, "a report that could not be written leaves nothing")

	if unix.Geteuid() == 0 { // modes do not stop root
		require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
		defer func() { require.NoError(t, unix.Unmount(dir, 0)) }()
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		require.ErrorIs(t, CanBeWritten(file), unix.EROFS)
		require.ErrorIs(t, CanBeWritten(file+"2"), unix.EROFS)
		return
	}
	require.NoError(t, os.Chmod(dir, 0o500))
	defer func() { require.NoError(t, os.Chmod(dir, 0o700)) }()
	require.ErrorIs(t, CanBeWritten(file), unix.EACCES)
}

func TestTouch(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(at("file"), nil, 0o600))
	require.NoError(t, os.Link(at("file"), at("hard")))
	require.NoError(t, os.Symlink("file", at("soft")))
	require.NoError(t, os.Symlink("new", at("dangling")))
	require.NoError(t, os.WriteFile(at("r.part"), nil, 0o600))
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"file", "file", true}, {"soft", "file", true}, {"hard", "file", true}, {"hard", "soft", true},
		{"new", "new", true}, {"dangling", "new", true}, {"./new", "new", true}, {"r", "r.part", true},
		{"new", "new.part", true},
		{"file", "new", false}, {"new", "newer", false}, {"file", "r", false},
	} {
		require.Equal(t, c.want, Touch(dir+"/"+c.a, dir+"/"+c.b), "%v", c)
		require.Equal(t, c.want, Touch(dir+"/"+c.b, dir+"/"+c.a), "%v", c)
	}
}
