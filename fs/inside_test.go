package fs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func olderKernel(o *Options) { o.withoutExpiry = true }

// waiting is a shell script that says "ready" where it has the line "wait", and waits there for goOn.
type waiting struct {
	in   io.WriteCloser
	out  *bufio.Reader
	wait func() error
	pid  int
}

// startWaiting starts script in dir, in a process that change may change, and returns when it waits.
func startWaiting(t *testing.T, dir, script string, change ...func(*syscall.SysProcAttr)) *waiting {
	t.Helper()
	cmd := shell(dir, strings.ReplaceAll(script, "wait\n", "echo ready; read line\n"))
	cmd.SysProcAttr = new(syscall.SysProcAttr)
	for _, c := range change {
		c(cmd.SysProcAttr)
	}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	w := &waiting{in, bufio.NewReader(out), cmd.Wait, cmd.Process.Pid}
	line, err := w.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	return w
}

// goOn lets the script go on and returns the rest of its output.
func (w *waiting) goOn(t *testing.T) string {
	t.Helper()
	_, err := io.WriteString(w.in, "\n")
	assert.NoError(t, err)
	rest, err := io.ReadAll(w.out)
	assert.NoError(t, err)
	assert.NoError(t, w.wait())
	return string(rest)
}

// tellAll tells the kernel that every name may have changed, in each way in which the daemon does that.
func (s *scene) tellAll() {
	paths := make(map[string]struct{})
	for _, n := range s.fs.table.byID.all() {
		paths[n.path()] = struct{}{}
	}
	s.fs.expirePaths(paths)
	(&tree{fs: s.fs}).giveUp("a test says so", nil)
}

// TestMountsInsideStay: what is mounted inside the mount stays when the kernel is told of changes in SOURCE. A program
// whose working directory is there still has one.
func TestMountsInsideStay(t *testing.T) {
	requireRoot(t)
	for name, change := range map[string][]func(*Options){
		"default":                       {},
		"write-back":                    {writeBack},
		"kernel opens":                  {unseenOpens},
		"kernel opens and write-back":   {unseenOpens, writeBack},
		"watched":                       {watchAll},
		"read-only":                     {watchAll, func(o *Options) { o.ReadOnly = true }},
		"passthrough":                   {passThrough},
		"older kernel and watched":      {olderKernel, watchAll},
		"older kernel and kernel opens": {olderKernel, unseenOpens},
		"older kernel":                  {olderKernel},
	} {
		t.Run(name, func(t *testing.T) {
			s := mount(t, append(change, withFiles(t, map[string]string{"job/file": "covered", "job/content": "own"}))...)
			inside(t, s, !s.isOlder())
		})
	}
}

func (s *scene) isOlder() bool {
	_, is := s.fs.notify.(sparing)
	return is
}

func inside(t *testing.T, s *scene, everywhere bool) {
	job := filepath.Join(s.mnt, "job")
	sh(t, filepath.Join(s.source, "job"), `mkdir tmpfs bind overlay nested elsewhere shown`)
	at := func(name string) string { return filepath.Join(job, name) }
	require.Eventually(t, func() bool {
		_, err := os.Stat(at("shown"))
		return err == nil
	}, eventually, tick)
	other := t.TempDir()
	sh(t, other, `mkdir lower upper work bound source; echo overlay >lower/x; echo bind >bound/x; echo file >x
		echo gaiafs >source/x`)
	var made []string
	do := func(name, source, kind string, flags uintptr, options string) {
		require.NoError(t, unix.Mount(source, at(name), kind, flags, options), name)
		made = append(made, at(name))
	}
	defer func() {
		for _, m := range made {
			_ = unix.Unmount(m, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}()
	do("tmpfs", "t", "tmpfs", 0, "size=1M")
	require.NoError(t, os.WriteFile(at("tmpfs/x"), []byte("tmpfs\n"), 0644))
	do("bind", filepath.Join(other, "bound"), "", unix.MS_BIND, "")
	do("file", filepath.Join(other, "x"), "", unix.MS_BIND, "")
	do("overlay", "o", "overlay", 0, fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", other))
	nested, err := Mount(Options{Source: filepath.Join(other, "source"), Mountpoint: at("nested")})
	require.NoError(t, err)
	defer func() { assert.NoError(t, nested.Unmount()) }()
	// A folder of the mount is mounted elsewhere.
	shown := filepath.Join(other, "bound")
	require.NoError(t, unix.Mount(at("shown"), shown, "", unix.MS_BIND, ""))
	defer func() { assert.NoError(t, unix.Unmount(shown, 0)) }()
	working := startWaiting(t, job, "wait\n/bin/pwd -P")
	var container *waiting
	if everywhere {
		container = startWaiting(t, job, `mount -t tmpfs t elsewhere; echo elsewhere >elsewhere/x; cd elsewhere
			wait
			/bin/pwd -P; cd ..; cat elsewhere/x`, func(attr *syscall.SysProcAttr) { attr.Unshareflags = syscall.CLONE_NEWNS })
	}

	for range 2 { // the second time, the kernel has looked up the names again
		s.tellAll()
		for path, content := range map[string]string{"tmpfs/x": "tmpfs", "bind/x": "bind", "file": "file",
			"overlay/x": "overlay", "nested/x": "gaiafs"} {
			got, err := os.ReadFile(at(path))
			if assert.NoError(t, err) {
				assert.Equal(t, content+"\n", string(got))
			}
		}
		_, err = os.ReadDir(shown)
		assert.NoError(t, err)
		m, err := MountAt(shown)
		assert.NoError(t, err)
		assert.Equal(t, "/job/shown", m.root) // "//deleted" is appended if the kernel dropped the name
	}
	assert.Equal(t, job+"\n", working.goOn(t))
	if container != nil {
		assert.Equal(t, at("elsewhere")+"\nelsewhere\n", container.goOn(t))
	}
}

// TestUsedByMounts finds mounts at and below paths, also through mounts of parts of the filesystem.
func TestUsedByMounts(t *testing.T) {
	mounts, err := parseMounts(strings.NewReader(
		`1 0 8:1 / / rw - ext4 /dev/x rw
2 1 0:50 / /mnt rw - fuse.gaiafs /data rw
3 2 0:51 / /mnt/a/b rw - tmpfs t rw
4 1 0:50 /sub/dir /srv rw - fuse.gaiafs /data rw
5 4 0:52 / /srv/deep/x rw - tmpfs t rw
6 1 0:53 / /mnt2/c rw - tmpfs t rw
`))
	require.NoError(t, err)
	for path, used := range map[string]bool{
		"/a": true, "/a/b": true, "/a/b/c": false, "/a/bc": false, "/c": false, "/sub": true, "/sub/dir": true,
		"/sub/dir/deep": true, "/sub/dir/deep/x": true, "/sub/dir/other": false, "/sub/other": false,
	} {
		assert.Equal(t, used, usedByMounts(mounts, "0:50", path), path)
	}
}

func init() {
	programs["look twice"] = func(args []string) error {
		in := bufio.NewReader(os.Stdin)
		for range 2 {
			fmt.Println("ready")
			if _, err := in.ReadString('\n'); err != nil {
				return err
			}
			_, err := os.Stat(args[0])
			fmt.Println(errors.Is(err, syscall.ENOMEM), err == nil)
		}
		return nil
	}
}

// TestMountInsideStaysWithoutDescriptors: if the daemon has no descriptors left and cannot look up a name, what is
// mounted there stays.
func TestMountInsideStaysWithoutDescriptors(t *testing.T) {
	requireRoot(t)
	s := mount(t, withFiles(t, map[string]string{"dir/at/f": "covered"}), func(o *Options) { o.EntryTimeout = -1 })
	at := filepath.Join(s.mnt, "dir/at")
	require.NoError(t, unix.Mount("t", at, "tmpfs", 0, "size=1M"))
	defer func() { require.NoError(t, unix.Unmount(at, unix.UMOUNT_NOFOLLOW)) }()
	require.NoError(t, os.WriteFile(filepath.Join(at, "x"), nil, 0644))
	cmd := program("look twice", filepath.Join(at, "x"))
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := bufio.NewScanner(out)
	next := func() string {
		require.True(t, said.Scan())
		return said.Text()
	}
	require.Equal(t, "ready", next())
	for s.fs.descriptors.shed() {
	}
	var before syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(unix.RLIMIT_NOFILE, &before))
	none := before
	none.Cur = 1
	require.NoError(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &none))
	_, err = io.WriteString(in, "\n")
	first := next()
	require.NoError(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, err)
	assert.Equal(t, "true false", first)
	require.Equal(t, "ready", next())
	_, err = io.WriteString(in, "\n")
	require.NoError(t, err)
	assert.Equal(t, "false true", next(), "the mount inside is gone")
	require.NoError(t, cmd.Wait())
}
