package fs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// countUnderLock adds 1 to the number in a file, repeatedly, under a lock.
func countUnderLock(path, kind string, times int) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	lock := func(how int, typ int16) error {
		if kind == "flock" {
			return unix.Flock(int(f.Fd()), how)
		}
		return unix.FcntlFlock(f.Fd(), unix.F_SETLKW, &unix.Flock_t{Type: typ})
	}
	for range times {
		if err := lock(unix.LOCK_EX, unix.F_WRLCK); err != nil {
			return err
		}
		buf := make([]byte, 20)
		n, err := f.ReadAt(buf, 0)
		if n == 0 && err != nil {
			return err
		}
		v, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(&writerAt{f, 0}, "%-19d\n", v+1); err != nil {
			return err
		}
		if err := lock(unix.LOCK_UN, unix.F_UNLCK); err != nil {
			return err
		}
	}
	return nil
}

type writerAt struct {
	f   *os.File
	off int64
}

func (w *writerAt) Write(p []byte) (int, error) { return w.f.WriteAt(p, w.off) }

func init() {
	programs["count under lock"] = func(args []string) error {
		times, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return countUnderLock(args[0], args[1], times)
	}
}

func TestLocksAcrossProcesses(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		for _, kind := range []string{"flock", "fcntl"} {
			path := filepath.Join(s.mnt, kind)
			require.NoError(t, os.WriteFile(path, []byte("0"), 0600))
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					out, err := program("count under lock", path, kind, "200").CombinedOutput()
					assert.NoError(t, err, string(out))
				})
			}
			all.Wait()
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.Equal(t, "800", strings.TrimSpace(string(got)))
		}
	})
}

func TestGit(t *testing.T) {
	requireTool(t, "git")
	everyMode(t, func(t *testing.T, s *scene) {
		sh(t, s.mnt, `
			export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
			git config --global user.email a@b; git config --global user.name n; git config --global init.defaultBranch main
			git init -q one; cd one
			for i in $(seq 50); do mkdir -p d$((i % 7)); echo $i > d$((i % 7))/f$i; done
			git add .; git commit -qm first
			for i in $(seq 50); do echo more >> d$((i % 7))/f$i; done
			git commit -qam second; git gc -q
			cd ..; git clone -q one two; cd two; git fsck --strict; git diff --exit-code HEAD; git checkout -q HEAD~1
			git -C ../one status --porcelain | grep . && exit 1 || :`)
	})
}

func TestSQLite(t *testing.T) {
	requireTool(t, "sqlite3")
	everyMode(t, func(t *testing.T, s *scene) {
		db := filepath.Join(s.mnt, "db")
		sql := func(script string) string {
			t.Helper()
			cmd := exec.Command("sqlite3", "-cmd", ".timeout 60000", db)
			cmd.Stdin = strings.NewReader(script)
			return strings.TrimSpace(run(t, cmd))
		}
		sql("pragma journal_mode=wal; create table t(w int, n int);")
		var all sync.WaitGroup
		for w := range 3 {
			all.Go(func() {
				var script strings.Builder
				for n := range 40 {
					fmt.Fprintf(&script, "begin immediate; insert into t values(%d,%d); commit;\n", w, n)
				}
				cmd := exec.Command("sqlite3", "-cmd", ".timeout 60000", db)
				cmd.Stdin = strings.NewReader(script.String())
				out, err := cmd.CombinedOutput()
				assert.NoError(t, err, string(out))
			})
		}
		all.Wait()
		assert.Equal(t, "120\nok", sql("select count(*) from (select distinct w, n from t); pragma integrity_check;"))
	})
}

func TestErrorsOfTheBackingReachThePrograms(t *testing.T) {
	requireTool(t, "strace")
	requireRoot(t)
	bothModes(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0600)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.Write(make([]byte, 4096))
		require.NoError(t, err)
		require.NoError(t, f.Sync())

		stop := inject(t, "pwrite64:error=EIO", filepath.Join(s.source, "f"))
		_, err = f.WriteAt([]byte("lost"), 0)
		if err == nil {
			err = f.Sync() // cached writes fail when they are written back
		}
		assert.ErrorIs(t, err, unix.EIO)
		stop()
		_, err = f.WriteAt([]byte("kept"), 0)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		got, err := os.ReadFile(filepath.Join(s.source, "f"))
		require.NoError(t, err)
		assert.Equal(t, "kept", string(got[:4]))
	})
}

// inject makes system calls of this process, which is the daemon, fail on a file until stop is called.
func inject(t *testing.T, what, path string) (stop func()) {
	t.Helper()
	call, _, _ := strings.Cut(what, ":")
	cmd := exec.Command("strace", "-f", "-qq", "-e", "trace="+call, "-e", "inject="+what, "-P", path, "-o", "/dev/null",
		"-p", strconv.Itoa(os.Getpid()))
	require.NoError(t, cmd.Start())
	ended := false
	stop = func() {
		if !ended {
			ended = true
			assert.NoError(t, cmd.Process.Signal(os.Interrupt))
			_ = cmd.Wait()
		}
	}
	t.Cleanup(stop)
	require.Eventually(t, func() bool { return tracedBy(t) == cmd.Process.Pid }, eventually, tick)
	return stop
}

// tracedBy returns the process that traces all threads of this process, or 0.
func tracedBy(t *testing.T) int {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	tracer := 0
	for i, task := range tasks {
		status, err := os.ReadFile(task)
		if err != nil {
			continue // the thread ended
		}
		_, rest, _ := strings.Cut(string(status), "TracerPid:\t")
		pid, err := strconv.Atoi(strings.TrimSpace(rest[:strings.IndexByte(rest, '\n')]))
		require.NoError(t, err)
		if i > 0 && pid != tracer {
			return 0
		}
		tracer = pid
	}
	return tracer
}
