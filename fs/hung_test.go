package fs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/hungfs"
)

// nest mounts a filesystem whose server can hang on the directory place below SOURCE. It contains the file f.
func (s *scene) nest(t *testing.T, place string) *hungfs.Server {
	t.Helper()
	shown := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(shown, "f"), []byte("nested"), 0o666))
	at := filepath.Join(s.source, place)
	require.NoError(t, os.MkdirAll(at, 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(filepath.Dir(at), "other"), 0o755))
	return hungfs.Mount(t, shown, at)
}

// unasked makes the kernel ask for everything, each time.
func unasked(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, -1 }

// hangs starts a script that cannot end before the server of h answers.
func (s *scene) hangs(t *testing.T, h *hungfs.Server, script string) {
	t.Helper()
	cmd := shell(s.mnt, script)
	require.NoError(t, cmd.Start())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		h.Kill()
		<-done
	})
}

// goesOn runs a program that must not wait for a request that hangs.
func (s *scene) goesOn(t *testing.T, h *hungfs.Server, cmd *exec.Cmd) {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	late := time.AfterFunc(eventually, h.Kill)
	err := cmd.Wait()
	require.True(t, late.Stop(), "it waits: %s\n%s", cmd.Args, out.String())
	assert.NoError(t, err, "%s\n%s", cmd.Args, out.String())
}

func init() {
	programs["rename mountpoint"] = func(args []string) error {
		if err := unix.Rename(args[0], args[1]); !errors.Is(err, syscall.EBUSY) {
			return fmt.Errorf("EBUSY is expected: %w", err)
		}
		return nil
	}
}

// beside looks at the directory in which a filesystem is mounted, and changes it.
const beside = `
	echo 1 > parent/a; mv parent/a parent/b; ln parent/b parent/c; rm parent/b; grep -q 1 parent/c
	mkdir parent/d; mv parent/c parent/d/c; mv parent/d/c c; rmdir parent/d; rm c
	ls parent; [ -d parent ]; echo new > parent/new; mv parent/new parent/newer; stat -c %s parent/newer; rm parent/newer`

// TestMountBelowSourceHangs: programs that look at the root of a mount below SOURCE, or into it, may wait for its
// server. The directory above stays usable.
func TestMountBelowSourceHangs(t *testing.T) {
	requireRoot(t)
	for name, hung := range map[string]struct{ kinds, script string }{
		"attributes of the root":     {"getattr", "stat parent/nested"},
		"listing with attributes":    {"getattr", "ls -l parent"},
		"attributes of a file":       {"getattr", "stat parent/nested/f"},
		"a name":                     {"lookup", "stat parent/nested/f"},
		"a file that is opened":      {"open", "cat parent/nested/f"},
		"the list":                   {"opendir", "ls parent/nested"},
		"a file on its way out":      {"getattr", "mv parent/nested/f parent/f"},
		"a link of it to the parent": {"getattr", "ln parent/nested/f parent/f"},
		"the root is moved": {"getattr",
			"mv parent/nested parent/elsewhere; rmdir parent/nested; stat parent/nested"},
	} {
		t.Run(name, func(t *testing.T) {
			s := mount(t, unasked)
			h := s.nest(t, "parent/nested")
			sh(t, s.mnt, "cat parent/nested/f; ls -l parent parent/nested")
			h.Hang(hung.kinds)
			s.hangs(t, h, hung.script)
			h.Wait(hung.kinds, 1)
			s.goesOn(t, h, shell(s.mnt, beside))
			s.goesOn(t, h, shell(s.mnt, "! rmdir parent/nested"))
			for _, names := range [][2]string{{"parent/nested", "parent/other"}, {"parent/other", "parent/nested"}} {
				from, to := filepath.Join(s.mnt, names[0]), filepath.Join(s.mnt, names[1])
				s.goesOn(t, h, program("rename mountpoint", from, to))
			}
		})
	}
}

// TestReapingGoesOn removes a file in SOURCE while the server of another file's filesystem hangs.
func TestReapingGoesOn(t *testing.T) {
	requireRoot(t)
	s := mount(t, unasked)
	h := s.nest(t, "parent/nested")
	sh(t, s.mnt, "chmod 640 parent/nested/f; touch own; chmod 640 own") // their nodes have descriptors
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(s.source, "own"), &st))
	own := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	require.NotNil(t, own)
	kept := func() bool {
		own.mu.Lock()
		defer own.mu.Unlock()
		return own.fd >= 0
	}
	require.True(t, kept())
	h.Hang("getattr")
	require.NoError(t, os.Remove(filepath.Join(s.source, "own")))
	assert.Eventually(t, func() bool { return !kept() }, eventually, tick)
}
